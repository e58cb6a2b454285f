// Interactive features: themes, a block's JSON, values under the pointer, and a zoomable timeline.
// All numbers come from the page's single copy of the data, and all text is set as text, never as
// markup.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("paralab-data").textContent);
  const tip = document.getElementById("tip");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function make(name, attributes = {}, ...content) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  }
  function draw(name, attributes, words) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (words !== undefined) made.textContent = words;
    return made;
  }
  function blockOf(element) {
    const [section, block] = element.closest(".block").querySelector(".json").dataset.path.split(".");
    return [...data.sections, ...(data.explore ?? [])][section].blocks[block];
  }

  // Format numbers like paralab/units.py; a test compares the two.
  // Python rounds 31.25 to 31.2, an even digit; toFixed rounds it up.
  function even(text, longer) {
    const rest = longer.slice(text.length), last = Number(longer.slice(0, text.length).match(/\d(?=\D*$)/));
    return /^\.?50*$/.test(rest) && last % 2 === 0 ? longer.slice(0, text.length) : text;
  }
  const fixed = (value, digits) => even(value.toFixed(digits), value.toFixed(digits + 40));
  function short(value, digits) {  // Python's %g
    const [exact, exponent] = value.toExponential(digits + 40).split("e");
    const [rounded, place] = value.toExponential(digits - 1).split("e");
    const head = Number(exponent === place ? even(rounded, exact) : rounded), power = Number(place);
    if (power >= -4 && power < digits) return String(Number(`${head}e${power}`));
    return `${head}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  }
  const grouped = (value) => fixed(value, 0).replace(/\B(?=(\d{3})+$)/g, ",");
  function seconds(value) {
    for (const [factor, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]]) {
      const shown = value * factor;
      if (shown >= 1 || unit === "µs") return `${shown < 100 ? short(shown, 3) : fixed(shown, 0)} ${unit}`;
    }
  }
  function size(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = 0;
    while (value >= 1024 && power < 4) { value /= 1024; power += 1; }
    return `${fixed(value, power ? 1 : 0)} ${units[power]}`;
  }
  function measure(value, unit) {
    if (value === null || value === undefined) return "not measured";
    if (unit === "seconds") return seconds(value);
    if (unit === "bytes") return size(value);
    if (unit === "share") return `${short(value * 100, 3)}%`;
    const shown = Math.abs(value) >= 1e4 ? grouped(value) : short(value, unit === "×" && Math.abs(value) < 100 ? 3 : 4);
    if (unit === "number" || unit === "×") return shown + unit.replace("number", "");
    return `${shown} ${shown === "1" ? unit.replace(/s$/, "") : unit}`;
  }
  function words(name, value) {
    const unit = { seconds: "seconds", bytes: "bytes", share: "share" }[name.split("_").pop()];
    if (typeof value === "number" && unit) return measure(value, unit);
    return value === null ? "not measured" : typeof value === "object" ? JSON.stringify(value) : String(value);
  }

  // The tooltip: a title and named values, next to a point and always inside the window.
  function showTip(title, rows, x, y) {
    const list = make("dl");
    for (const [name, value] of rows) list.append(make("dt", {}, name), make("dd", {}, value));
    tip.replaceChildren(make("strong", {}, title), list);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const right = x + 14 + box.width <= innerWidth - 8;
    tip.style.left = `${clamp(right ? x + 14 : x - 14 - box.width, 8, Math.max(8, innerWidth - 8 - box.width))}px`;
    tip.style.top = `${clamp(y + 16 + box.height <= innerHeight ? y + 16 : y - 12 - box.height, 8, innerHeight)}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("scroll", hideTip, { passive: true });

  function themes() {
    const buttons = all("[data-set-theme]");
    for (const button of buttons) {
      button.addEventListener("click", () => {
        document.documentElement.dataset.theme = button.dataset.setTheme;
        for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      });
    }
  }

  function contents() {
    const list = document.querySelector("nav details");
    const narrow = matchMedia("(max-width: 999px)");
    const fit = () => { list.open = !narrow.matches; };
    narrow.addEventListener("change", fit);
    fit();
    const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
    const watcher = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id).setAttribute("aria-current", "true");
      }
    }, { rootMargin: "-10% 0px -80% 0px" });
    for (const id of links.keys()) watcher.observe(document.getElementById(id));
  }

  // Keep short arrays on one line: JSON.stringify puts each number in a curve on its own line.
  function pretty(value, indent = "") {
    const line = JSON.stringify(value), inner = `${indent}  `;
    if (indent.length + line.length <= 96 || typeof value !== "object") return line;
    const items = Array.isArray(value)
      ? value.map((item) => inner + pretty(item, inner))
      : Object.entries(value).map(([key, item]) => `${inner}${JSON.stringify(key)}: ${pretty(item, inner)}`);
    const [open, close] = Array.isArray(value) ? "[]" : "{}";
    return `${open}\n${items.join(",\n")}\n${indent}${close}`;
  }

  function disclosures() {
    for (const details of all(".json")) {
      const shown = details.querySelector("pre");
      details.addEventListener("toggle", () => {
        if (details.open && !shown.textContent) shown.textContent = pretty(blockOf(details));
      });
      const button = details.querySelector(".copy");
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(shown.textContent);
        } catch {  // the clipboard needs a secure origin; without one, select the text for the copy command
          getSelection().selectAllChildren(shown);
          document.execCommand("copy");
        }
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
    }
  }

  // Curves: draw a vertical line at the nearest x, and show each curve's value there.
  function curves(svg) {
    const holder = svg.closest(".curves");
    const block = blockOf(holder), plot = JSON.parse(svg.dataset.plot);
    const usable = (point) => point[0] !== null && point[1] !== null && (!plot.log || point[0] > 0);
    const lines = block.lines.map((line) => ({ label: line.label, points: line.points.filter(usable) })).filter((line) => line.points.length);
    const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    const along = plot.log ? Math.log : (value) => value;
    const toX = (value) => plot.x[2] + (along(value) - along(plot.x[0])) / (along(plot.x[1]) - along(plot.x[0])) * (plot.x[3] - plot.x[2]);
    const toY = (value) => plot.y[2] + (value - plot.y[0]) / (plot.y[1] - plot.y[0]) * (plot.y[3] - plot.y[2]);
    const cross = svg.appendChild(draw("g", { "pointer-events": "none" }));
    let at = -1;
    const nearest = (values, value) => values.reduce((best, one, n) => (Math.abs(toX(one) - value) < Math.abs(toX(values[best]) - value) ? n : best), 0);
    function show(index, clientY) {
      at = clamp(index, 0, xs.length - 1);
      const x = toX(xs[at]), rows = [];
      cross.replaceChildren(draw("line", { class: "crosshair", x1: x, x2: x, y1: plot.y[3], y2: plot.y[2] }));
      for (const line of lines) {
        const point = line.points[nearest(line.points.map((one) => one[0]), x)];
        rows.push([line.label, measure(point[1], block.y_unit) + (point[0] === xs[at] ? "" : ` (at ${measure(point[0], "number")})`)]);
        cross.append(draw("path", { class: `points line-${block.lines.findIndex((one) => one.label === line.label) % 8}`, d: `M${toX(point[0])} ${toY(point[1])}h0` }));
      }
      const box = svg.getBoundingClientRect();
      showTip(`${block.x} ${measure(xs[at], "number")}`, rows, box.left + x / svg.viewBox.baseVal.width * box.width, clientY ?? box.top + 40);
    }
    const hide = () => { cross.replaceChildren(); hideTip(); };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show(nearest(xs, (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width), event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    holder.addEventListener("blur", hide);
    holder.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || !svg.clientWidth) return;  // only the displayed drawing
      event.preventDefault();
      show(at < 0 ? 0 : at + move);
    });
  }

  // The timeline: the page contains all rectangles, and this code lays out the visible ones again.
  const SIDE = 8, MOST = 20000;  // free px on each side; maximum zoom
  function timeline(holder) {
    const svg = holder.querySelector("svg[data-begin]");
    if (!svg) return;
    const block = blockOf(holder), bars = all(".span", svg), labels = svg.querySelector(".labels"), steps = svg.querySelector(".steps");
    const ticks = svg.querySelector(".axis"), range = holder.querySelector(".range"), bottom = Number(svg.dataset.bottom);
    const begin = Number(svg.dataset.begin), end = Number(svg.dataset.end), height = svg.viewBox.baseVal.height;
    const view = { begin, end };
    let width = 0, current = -1, waiting = false;
    for (const bar of bars) bar.querySelector("title")?.remove();  // the tooltip shows more

    const toX = (time) => SIDE + (time - view.begin) / (view.end - view.begin) * (width - 2 * SIDE);
    const toTime = (x) => view.begin + (x - SIDE) / (width - 2 * SIDE) * (view.end - view.begin);

    function lay() {
      waiting = false;
      width = Math.max(holder.clientWidth, 240);
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      labels.replaceChildren();
      bars.forEach((bar, index) => {
        const span = block.spans[index];
        const left = clamp(toX(span.start), -4, width + 4), right = clamp(toX(span.end), -4, width + 4);
        const visible = span.end >= view.begin && span.start <= view.end;
        bar.style.display = visible ? "" : "none";
        if (!visible) return;
        bar.setAttribute("x", left.toFixed(2));
        bar.setAttribute("width", Math.max(right - left, 0.8).toFixed(2));
        const room = Math.min(right, width) - Math.max(left, 0);
        if (room > 7 * span.label.length + 8) {
          const middle = (Math.min(right, width) + Math.max(left, 0)) / 2;
          const look = `in-span${span.exposed ? " on-exposed" : ""}`;
          labels.append(draw("text", { class: look, x: middle, y: Number(bar.getAttribute("y")) + 15, "text-anchor": "middle" }, span.label));
        }
      });
      laySteps();
      layTicks();
      svg.dataset.view = JSON.stringify([view.begin, view.end]);
    }
    function laySteps() {
      steps.replaceChildren();
      for (const [number, from, to] of block.steps) {
        if (to < view.begin || from > view.end) continue;
        const left = toX(from);
        if (left >= 0) steps.append(draw("line", { class: "step", x1: left, x2: left, y1: 4, y2: bottom }));
        if (Math.min(toX(to), width) - Math.max(left, 0) > 56) steps.append(draw("text", { class: "tick", x: Math.max(left, 0) + 5, y: 14 }, `step ${number}`));
      }
    }
    function layTicks() {
      const from = view.begin - begin, to = view.end - begin;
      const [factor, unit] = to >= 1 ? [1, "s"] : to >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
      const rough = (to - from) * factor / Math.max(width / 80, 3), power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
      const digits = clamp(2 - Math.floor(Math.log10((to - from) * factor)), 0, 6);
      range.value = `${(from * factor).toFixed(digits)} – ${(to * factor).toFixed(digits)} ${unit}`;
      ticks.replaceChildren();
      for (let n = Math.ceil(from * factor / step - 1e-9); n * step <= to * factor * (1 + 1e-9); n += 1) {
        const x = toX(begin + n * step / factor), shown = String(Number((n * step).toPrecision(10)));
        const half = 3.6 * shown.length;  // keep the outermost numbers inside the chart
        ticks.append(draw("line", { class: "grid", x1: x, x2: x, y1: bottom, y2: bottom + 5 }));
        ticks.append(draw("text", { class: "tick", x: clamp(x, half, width - half), y: bottom + 18, "text-anchor": "middle" }, shown));
      }
      ticks.append(draw("text", { class: "axis-name", x: width - SIDE, y: bottom + 36, "text-anchor": "end" }, `${unit} from the start`));
    }
    const relay = () => { if (!waiting) { waiting = true; requestAnimationFrame(lay); } };

    function look(from, length) {
      const whole = end - begin, kept = clamp(length, whole / MOST, whole);
      view.begin = clamp(from, begin, end - kept);
      view.end = view.begin + kept;
      relay();
    }
    function zoom(factor, x = width / 2) {
      const time = toTime(x), length = (view.end - view.begin) / factor;
      look(time - (time - view.begin) * clamp(length, (end - begin) / MOST, end - begin) / (view.end - view.begin), length);
    }
    const pan = (share) => look(view.begin + share * (view.end - view.begin), view.end - view.begin);
    const reset = () => look(begin, end - begin);

    function tell(index, x, y) {
      const span = block.spans[index];
      bars[current]?.classList.remove("here");
      current = index;
      bars[index].classList.add("here");
      const details = Object.entries(span.details).map(([name, value]) => [name.replaceAll("_", " "), words(name, value)]);
      showTip(span.label, [
        ["kind", span.kind.replaceAll("_", "-") + (span.exposed ? ", exposed" : "")], ["lane", block.lanes[span.lane]],
        ["start", seconds(span.start - begin)], ["duration", seconds(span.end - span.start)], ...details,
      ], x, y);
    }
    function forget() {
      bars[current]?.classList.remove("here");
      hideTip();
    }
    // Return the current span's neighbor in its lane, or the span nearest in time in the next lane.
    function neighbor(key) {
      const spans = block.spans, now = spans[current], order = spans.map((_, index) => index);
      if (!now) return order.filter((n) => spans[n].lane === 0).sort((a, b) => spans[a].start - spans[b].start)[0] ?? 0;
      if (key === "ArrowLeft" || key === "ArrowRight") {
        const lane = order.filter((n) => spans[n].lane === now.lane).sort((a, b) => spans[a].start - spans[b].start || a - b);
        return lane[clamp(lane.indexOf(current) + (key === "ArrowLeft" ? -1 : 1), 0, lane.length - 1)];
      }
      const way = key === "ArrowUp" ? -1 : 1, middle = (now.start + now.end) / 2;
      for (let lane = now.lane + way; lane >= 0 && lane < block.lanes.length; lane += way) {
        const far = (n) => Math.abs((spans[n].start + spans[n].end) / 2 - middle);
        const found = order.filter((n) => spans[n].lane === lane).sort((a, b) => far(a) - far(b));
        if (found.length) return found[0];
      }
      return current;
    }
    function goTo(index) {
      const span = block.spans[index], length = view.end - view.begin;
      if (!span) return;
      if (span.end < view.begin + 0.02 * length || span.start > view.end - 0.02 * length) look((span.start + span.end - length) / 2, length);
      lay();
      const box = bars[index].getBoundingClientRect();
      tell(index, clamp(box.left + Math.min(box.width / 2, 40), 0, innerWidth), box.bottom - 8);
    }

    holder.addEventListener("keydown", (event) => {
      const arrow = event.key.startsWith("Arrow");
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.shiftKey && arrow) goTo(neighbor(event.key));
      else if (event.key === "ArrowLeft") pan(-0.15);
      else if (event.key === "ArrowRight") pan(0.15);
      else if (event.key === "+" || event.key === "=") zoom(1.5);
      else if (event.key === "-" || event.key === "−") zoom(1 / 1.5);
      else if (event.key === "0") reset();
      else return;
      event.preventDefault();
    });
    holder.addEventListener("blur", forget);
    for (const button of all("[data-zoom]", holder)) {
      button.addEventListener("click", () => ({ in: () => zoom(1.5), out: () => zoom(1 / 1.5), reset })[button.dataset.zoom]());
    }
    svg.addEventListener("wheel", (event) => {
      const whole = view.end - view.begin >= end - begin;
      if (event.deltaY === 0 || (whole && event.deltaY > 0)) return;  // everything is already visible: scroll the page
      event.preventDefault();
      zoom(Math.exp(-clamp(event.deltaY, -240, 240) * 0.0025), event.clientX - svg.getBoundingClientRect().left);
    }, { passive: false });

    let grip = null;  // where a drag started
    svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      grip = { x: event.clientX, begin: view.begin };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (grip && Math.abs(event.clientX - grip.x) > 2) {
        holder.classList.add("dragging");
        look(grip.begin - (event.clientX - grip.x) / (width - 2 * SIDE) * (view.end - view.begin), view.end - view.begin);
        hideTip();
      } else if (event.target.dataset.index) tell(Number(event.target.dataset.index), event.clientX, event.clientY);
      else forget();
    });
    const drop = (event) => {
      const tapped = grip && !holder.classList.contains("dragging") && document.elementFromPoint(event.clientX, event.clientY)?.dataset.index;
      if (tapped) tell(Number(tapped), event.clientX, event.clientY);  // a finger cannot hover
      grip = null;
      holder.classList.remove("dragging");
    };
    svg.addEventListener("pointerup", drop);
    svg.addEventListener("pointercancel", drop);
    svg.addEventListener("pointerleave", forget);
    new ResizeObserver(relay).observe(holder);
    lay();
    spanTable(holder, block, begin);
  }

  // All spans as text, created on demand.
  function spanTable(holder, block, begin) {
    const details = holder.closest(".block").querySelector(".span-table");
    details.addEventListener("toggle", () => {
      const place = details.querySelector(".scroll");
      if (!details.open || place.firstChild) return;
      const names = ["span", "kind", "lane", "start", "duration", "exposed", "details"];
      const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col", ...(name === "start" || name === "duration" ? { class: "number" } : {}) }, name)));
      const rows = block.spans.map((span) => make("tr", {},
        make("th", { scope: "row" }, span.label), make("td", {}, span.kind), make("td", {}, block.lanes[span.lane]),
        make("td", { class: "number" }, seconds(span.start - begin)), make("td", { class: "number" }, seconds(span.end - span.start)),
        make("td", {}, span.exposed ? "yes" : "no"),
        make("td", {}, Object.entries(span.details).map(([name, value]) => `${name.replaceAll("_", " ")}: ${words(name, value)}`).join(", "))));
      place.append(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
    });
  }

  themes();
  contents();
  disclosures();
  all(".curves svg[data-plot]").forEach(curves);
  all(".timeline").forEach(timeline);
  window.paralab = { all, blockOf, draw, measure };
})();
