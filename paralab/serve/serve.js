// Keep a page current: replace the parts that the server sends, and show the state of the connection. The
// server escapes all text in the parts, and the page's policy forbids scripts in them.
"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const element = (id) => document.getElementById(id);

  // The token moves from the address to a cookie, so that it is not in a copied address.
  const address = new URL(location.href);
  if (address.searchParams.has("token")) {
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }

  function themes() {
    const buttons = all("[data-set-theme]");
    const set = (theme) => {
      document.documentElement.dataset.theme = theme;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.setTheme === theme));
    };
    set(sessionStorage.getItem("theme") || "auto");
    for (const button of buttons) {
      button.addEventListener("click", () => {
        sessionStorage.setItem("theme", button.dataset.setTheme);
        set(button.dataset.setTheme);
      });
    }
  }

  // The list: replace only the rows that changed, and keep what is selected and focused.
  function showRows(rows) {
    const body = element("rows"), old = new Map(all("#rows > tr").map((row) => [row.dataset.name, row]));
    const wanted = rows.map(([name, html]) => {
      const before = old.get(name), holder = document.createElement("tbody");
      holder.innerHTML = html;
      const row = holder.firstElementChild, box = row.querySelector("input"), boxBefore = before?.querySelector("input");
      row.hidden = before?.hidden ?? false;
      if (before?.isEqualNode(row)) return before;
      if (box && boxBefore) box.checked = boxBefore.checked;
      return row;
    });
    const focused = document.activeElement, name = focused?.closest?.("#rows > tr")?.dataset.name, kind = focused?.localName;
    if (wanted.length !== body.children.length || wanted.some((row, n) => row !== body.children[n])) body.replaceChildren(...wanted);
    if (name !== undefined && !focused.isConnected) wanted.find((row) => row.dataset.name === name)?.querySelector(kind)?.focus();
    else if (name !== undefined && document.activeElement !== focused) focused.focus();
    element("empty").hidden = rows.length > 0;
    filter();
    count();
  }
  function filter() {
    const words = element("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of all("#rows > tr")) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  }
  function count() {
    const button = element("compare"), selected = all("#rows input:checked").length;
    button.disabled = selected < 2;
    button.textContent = selected < 2 ? "Select runs to compare" : `Compare the ${selected} selected runs`;
  }
  function list() {
    element("filter").addEventListener("input", filter);
    element("rows").addEventListener("change", count);
    filter();
    count();
  }

  function show(parts) {
    for (const [id, part] of Object.entries(parts)) {
      if (id === "rows") showRows(part);
      else element(id).innerHTML = part;
    }
  }
  function say(words, lost = false) {
    element("connection").textContent = words;
    element("connection").classList.toggle("lost", lost);
  }

  // A hidden page closes its stream, because a browser opens only six per server.
  let source = null, isOver = false;
  function open() {
    if (source || isOver || document.hidden) return;
    source = new EventSource(document.body.dataset.events);
    source.addEventListener("open", () => say("updating"));
    source.addEventListener("parts", (event) => { say("updating"); show(JSON.parse(event.data)); });
    source.addEventListener("over", () => { isOver = true; close(); say(""); });
    source.addEventListener("problem", (event) => { isOver = true; close(); say(JSON.parse(event.data).text, true); });
    source.addEventListener("error", () => {
      say("Connection lost. Trying again.", true);
      if (source && source.readyState === EventSource.CLOSED) { close(); setTimeout(open, 2000); }
    });
  }
  function close() {
    source?.close();
    source = null;
  }

  themes();
  if (document.body.classList.contains("list")) list();
  if (document.body.dataset.events) {
    document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
    addEventListener("pagehide", close);
    addEventListener("pageshow", open);
    open();
  }
})();
