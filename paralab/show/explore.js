// Figures with sliders. Each function computes the same as the Python function it names; a test
// moves the sliders and compares the numbers.
(() => {
  const { all, blockOf, draw, measure } = window.paralab;
  const output = (name, label, value, unit) => ({ name, value, text: measure(value, unit) });
  const range = (count) => [...Array(count).keys()];

  // paralab/plan/batches.py
  function chunkSizes(samples, parts) {
    const each = Math.ceil(samples / parts);
    return range(parts).map((part) => Math.max(0, Math.min(each, samples - part * each)));
  }
  const evenSizes = (samples, parts) => range(parts).map((part) => Math.floor(samples / parts) + (part < samples % parts ? 1 : 0));

  // paralab/plan/schedules.py
  const PARTS = { gpipe: 1, "1f1b": 1, interleaved: 2, "zero-bubble": 2 };
  const rounds = (stages, micro) => Math.max(1, Math.floor(micro / stages));
  function misfit(name, stages, micro) {
    const turns = rounds(stages, micro);
    if (name !== "gpipe" && micro < stages) return `${name} needs at least one micro-batch per stage: ${micro} < ${stages} stages`;
    if (PARTS[name] > 1 && micro % turns) return `${name} runs ${turns} equal rounds (micro-batches ÷ stages), but ${micro} is not a multiple of ${turns}`;
    return "";
  }
  const passesOf = (micro, name) => PARTS[name] * micro * (name === "zero-bubble" ? 3 : 1);
  const idealBubble = (stages, micro, name) => (stages - 1) / (passesOf(micro, name) + stages - 1);
  function order(name, stages, micro) {
    const chunks = PARTS[name], split = name === "zero-bubble";
    const perRound = Math.floor(micro / rounds(stages, micro));
    const places = range(chunks * micro).map((n) => [Math.floor(n / perRound) % chunks, Math.floor(n / (perRound * chunks)) * perRound + n % perRound]);
    return range(stages).map((rank) => {
      let ahead = (chunks - 1) * perRound + (name === "interleaved" ? 2 : 1) * (stages - 1 - rank);
      ahead = name === "gpipe" ? places.length : Math.min(ahead, places.length);
      const forward = places.map(([chunk, number]) => ({ part: chunk * stages + rank, kind: "F", micro: number }));
      const actions = forward.slice(0, ahead), weights = [];
      places.forEach(([chunk, number], n) => {
        const part = (chunks - 1 - chunk) * stages + rank;
        actions.push(...forward.slice(ahead + n, ahead + n + 1), { part, kind: split ? "I" : "B", micro: number });
        if (split) weights.push({ part, kind: "W", micro: number });
        if (weights.length && n >= rank) actions.push(weights.shift());
      });
      return [...actions, ...weights];
    });
  }
  function simulate(orders, seconds) {
    const parts = 1 + Math.max(...orders.flat().map((action) => action.part));
    const done = new Map(), free = orders.map(() => 0), waiting = orders.map((actions) => [...actions]), slots = [];
    while (waiting.some((actions) => actions.length)) {
      waiting.forEach((actions, rank) => {
        while (actions.length) {
          const { part, kind, micro } = actions[0];
          const before = kind === "F" ? (part ? [`F ${part - 1} ${micro}`] : []) : kind === "W" ? [`I ${part} ${micro}`]
            : [`F ${part} ${micro}`, `I ${part + 1} ${micro}`].slice(0, parts - part);
          if (before.some((key) => !done.has(key))) break;
          const start = Math.max(free[rank], ...before.map((key) => done.get(key)));
          free[rank] = start + seconds[kind];
          done.set(`${kind === "B" ? "I" : kind} ${part} ${micro}`, free[rank]);
          slots.push({ rank, ...actions.shift(), start, end: free[rank] });
        }
      });
    }
    return slots;
  }

  // paralab/plan/overlap.py
  function reduceBuckets(backward, total, bucket, latency, rate) {
    let free = 0;
    return range(Math.ceil(total / bucket - 1e-9)).map((number) => {
      const reduced = Math.min((number + 1) * bucket, total);
      const start = Math.max(backward * reduced / total, free);
      free = start + latency + (reduced - number * bucket) / rate;
      return { start, end: free };
    });
  }

  // paralab/plan/memory.py
  const STRATEGIES = ["single", "dp", "ddp", "fsdp", "pipeline"];
  function deviceMemory(strategy, devices, batch, whole, precision) {
    const pieces = strategy === "fsdp" || strategy === "pipeline" ? devices : 1;
    const samples = strategy === "single" ? batch : strategy === "pipeline" ? batch / devices : chunkSizes(batch, devices)[0];
    return {
      parameters: whole.parameters / pieces, gradients: whole.gradients / pieces, optimizer: whole.optimizer / pieces,
      activations: whole.activations_per_sample * (precision === "bf16" ? 0.5 : 1) * samples,
    };
  }

  // paralab/plan/scaling.py
  const sent = (strategy, devices) => 2 * (devices - 1) / (strategy === "ddp" ? devices : 1);
  const predictStep = (devices, known) => ({
    compute: known.compute_seconds / devices, optimizer: known.optimizer_seconds, other: known.other_seconds,
    exposed: (1 - known.overlap) * (known.communication_seconds * (sent(known.strategy, devices) / sent(known.strategy, known.measured_devices))),
  });
  const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);

  // paralab/show/explore.py
  const KINDS = { F: "forward", B: "backward", I: "backward", W: "weights" };
  const FIGURES = {
    schedule(values, known) {
      const { stages, micro_batches: micro, schedule: name } = values;
      const measured = range(1 + Math.max(...known.measured.map((row) => row[0]))).map((stage) => ({
        label: `measured ${stage}`,
        boxes: known.measured.filter((row) => row[0] === stage).map(([, number, kind, start, end]) => ({ start, end, kind, words: String(number) })),
      }));
      const measuredEnd = Math.max(...measured.flatMap((lane) => lane.boxes.map((box) => box.end)));
      const problem = misfit(name, stages, micro);
      const took = output("measured_seconds", "Measured time", measuredEnd, "seconds");
      if (problem) {
        const unknown = ["bubble", "ideal_seconds", "difference"].map((key) => ({ name: key, value: "", text: "–" }));
        return { unit: "seconds", lanes: measured, outputs: [...unknown, took], problem };
      }
      const [forward, backward] = ["forward_seconds", "backward_seconds"].map((key) => known[key] / (stages * micro * PARTS[name]));
      const slots = simulate(order(name, stages, micro), { F: forward, B: backward, I: backward / 2, W: backward / 2 });
      const idealEnd = Math.max(...slots.map((slot) => slot.end));
      const ideal = range(stages).map((stage) => ({
        label: `ideal ${stage}`,
        boxes: slots.filter((slot) => slot.rank === stage).map((slot) => ({ start: slot.start, end: slot.end, kind: KINDS[slot.kind], words: String(slot.micro) })),
      }));
      const ends = [idealEnd, measuredEnd].sort((a, b) => a - b);
      for (const lane of idealEnd > measuredEnd ? measured : ideal) lane.boxes.push({ start: ends[0], end: ends[1], kind: "difference", words: "" });
      const bubble = idealBubble(stages, micro, name), difference = measuredEnd - idealEnd;
      return {
        unit: "seconds", lanes: [...ideal, ...measured], outputs: [
          { name: "bubble", value: bubble, text: `(${stages} − 1) / (${passesOf(micro, name)} + ${stages} − 1) = ${measure(bubble, "share")}` },
          output("ideal_seconds", "Ideal time", idealEnd, "seconds"), took,
          { name: "difference", value: difference, text: `${difference < 0 ? "−" : "+"}${measure(Math.abs(difference), "seconds")}` },
        ],
      };
    },
    overlap(values, known) {
      const { backward_seconds: backward, gradient_bytes: total } = known;
      const latency = known.transfer_seconds * values.latency / 100;
      const rate = known.transfer_bytes / (known.transfer_seconds - latency) * 2 ** values.speed;
      const size = total * values.bucket / known.parts;
      const transfers = reduceBuckets(backward, total, size, latency, rate);
      const end = transfers.at(-1).end, exposed = Math.max(0, end - backward);
      const busy = transfers.reduce((time, each) => time + each.end - each.start, 0);
      const device = [{ start: 0, end: backward, kind: "backward", words: "backward" }];
      if (exposed) device.push({ start: backward, end, kind: "exposed", words: "" });
      const one = latency + size / rate;
      return {
        unit: "seconds",
        lanes: [{ label: "device", boxes: device }, { label: "all-reduce", boxes: transfers.map((each, n) => ({ ...each, kind: "all_reduce", words: String(n) })) }],
        outputs: [
          output("buckets", "Buckets", transfers.length, "number"),
          { name: "transfer", value: one, text: `${measure(latency, "seconds")} + ${measure(size, "bytes")} / ${measure(rate, "bytes")}/s = ${measure(one, "seconds")}` },
          output("hidden", "Hidden share", 1 - exposed / busy, "share"), output("exposed", "Exposed", exposed, "seconds"),
          output("measured", "Exposed in the run", known.exposed_seconds, "seconds"),
        ],
      };
    },
    memory(values, known) {
      const held = STRATEGIES.map((strategy) => [strategy, deviceMemory(strategy, values.devices, values.batch, known, values.precision)]);
      const lanes = held.map(([label, parts]) => {
        let start = 0;
        return { label, boxes: Object.entries(parts).map(([kind, bytes]) => ({ kind, words: measure(bytes, "bytes"), start, end: start += bytes })) };
      });
      const peakOf = (strategy) => (values.batch === known.measured_batch ? known.measured : []).find((row) =>
        row[0] === strategy && row[1] === (strategy === "single" ? 1 : values.devices) && row[2] === values.precision)?.[3];
      return {
        unit: "bytes", lanes, outputs: lanes.map(({ label, boxes }) => {
          const end = boxes.at(-1).end, peak = peakOf(label);
          return { name: label, value: end, text: measure(end, "bytes") + (peak ? `; measured: ${measure(peak, "bytes")}` : "") };
        }),
      };
    },
    split(values) {
      const shares = chunkSizes(values.batch, values.devices), each = Math.ceil(values.batch / values.devices);
      let start = 0;
      const lanes = shares.map((share, device) => ({
        label: `device ${device}`,
        boxes: evenSizes(share, values.accumulate).filter((piece) => piece).map((piece) => ({ kind: "samples", words: String(piece), start, end: start += piece })),
      }));
      const pieces = evenSizes(shares[0], values.accumulate).filter((piece) => piece).join(" + ");
      return {
        unit: "samples", lanes, outputs: [
          { name: "share", value: each, text: `ceil(${values.batch} / ${values.devices}) = ${each}` },
          { name: "split", value: shares.join("/"), text: shares.join("/") }, { name: "passes", value: pieces, text: pieces },
          output("idle", "Devices without samples", shares.filter((share) => !share).length, "number"),
        ],
      };
    },
    what_if(values, known) {
      const counts = [...new Set([1, 2, 4, 8, 16, 32, 64, values.devices])].sort((a, b) => a - b);
      const lanes = counts.map((devices) => {
        let start = 0;
        const parts = Object.entries(predictStep(devices, known)).filter(([, time]) => time);
        return { label: `${devices}${devices === values.devices ? " ←" : ""}`, boxes: parts.map(([kind, time]) => ({ kind, words: "", start, end: start += time })) };
      });
      const chosen = predictStep(values.devices, known), step = sum(chosen), gain = sum(predictStep(1, known)) / step;
      const measured = known.measured_seconds[values.devices] ?? null;
      return {
        unit: "seconds", lanes, outputs: [
          { name: "step", value: step, text: `${Object.values(chosen).map((time) => measure(time, "seconds")).join(" + ")} = ${measure(step, "seconds")}` },
          output("speed_up", "Predicted speed-up", gain, "×"), output("efficiency", "Efficiency", gain / values.devices, "share"),
          { name: "measured", value: measured ?? "", text: measure(measured, "seconds") },
        ],
      };
    },
  };
  function controlWords(known, name, value) {
    if (name === "latency") return measure(known.transfer_seconds * value / 100, "seconds");
    if (name === "speed") return `× ${Number((2 ** value).toPrecision(6))}`;
    return name === "bucket" ? measure(known.gradient_bytes * value / known.parts, "bytes") : String(value);
  }

  // paralab/show/svg.py and chart_explore.py
  const AXIS = 26, LABELS = 92, RIGHT = 46, TALLEST = 44, SHARE = 0.8, CHARACTER = 7.5;
  function axis(high, unit, about) {
    const sizes = ["B", "KiB", "MiB", "GiB", "TiB"];
    let factor = 1, name = unit;
    if (unit === "seconds") [factor, name] = high >= 1 ? [1, "s"] : high * 1e3 >= 1 ? [1e3, "ms"] : [1e6, "µs"];
    if (unit === "bytes") {
      let power = 0;
      while (high >= 1024 ** (power + 1) && power < 4) power += 1;
      [factor, name] = [1024 ** -power, sizes[power]];
    }
    const rough = high * factor / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
    const last = Math.ceil(high * factor / step - 1e-9);
    const ticks = range(last + 1).map((n) => [n * step / factor, String(Number((n * step).toPrecision(6)))]);
    ticks[last][1] += ` ${name}`;
    return { high: ticks[last][0], ticks };
  }
  function drawLanes(svg, state) {
    const { width, height: room } = svg.viewBox.baseVal, lanes = state.lanes;
    const high = Math.max(...lanes.flatMap((lane) => lane.boxes.map((box) => box.end)));
    const { high: end, ticks } = axis(high, state.unit, Math.max(3, Math.floor(width / 120)));
    const toX = (value) => LABELS + value / end * (width - RIGHT - LABELS);
    const tall = Math.min(TALLEST, (room - AXIS) / lanes.length), bottom = tall * lanes.length, height = tall * SHARE;
    const grid = draw("g", {});
    for (const [tick] of ticks) grid.append(draw("line", { class: "grid", x1: toX(tick), y1: 0, x2: toX(tick), y2: bottom }));
    for (const [tick, words] of ticks) grid.append(draw("text", { class: "tick", x: toX(tick), y: bottom + 18, "text-anchor": "middle" }, words));
    const drawn = [grid];
    lanes.forEach((lane, number) => {
      const top = tall * number, baseline = top + height / 2 + 4.5;
      drawn.push(draw("text", { class: "label", x: LABELS - 8, y: baseline, "text-anchor": "end" }, lane.label));
      for (const box of lane.boxes) {
        const left = toX(box.start), wide = Math.max(toX(box.end) - left, 0.5);
        drawn.push(draw("rect", { class: `span is-${box.kind}`, x: left, y: top, width: wide, height, fill: `url(#paint-${box.kind})` }));
        if (box.words && height >= 13 && wide > CHARACTER * box.words.length + 2) {
          drawn.push(draw("text", { class: "in-span", x: left + wide / 2, y: baseline, "text-anchor": "middle" }, box.words));
        }
      }
    });
    svg.querySelector(".lanes").replaceChildren(...drawn);
  }

  for (const holder of all(".explorable")) {
    const block = blockOf(holder), inputs = all("[data-name]", holder);
    const show = () => {
      const values = Object.fromEntries(inputs.map((input) => [input.dataset.name, input.type === "range" ? Number(input.value) : input.value]));
      const state = FIGURES[block.figure](values, block.constants);
      for (const input of inputs.filter((one) => one.type === "range")) {
        const words = controlWords(block.constants, input.dataset.name, Number(input.value));
        holder.querySelector(`[data-control=${input.dataset.name}]`).value = words;
        input.setAttribute("aria-valuetext", words);
      }
      for (const { name, value, text } of state.outputs) {
        const element = holder.querySelector(`[data-output="${name}"]`);
        element.value = text;
        element.dataset.value = JSON.stringify(value);
      }
      holder.querySelector(".problem").textContent = state.problem ?? "";
      const words = all("[data-output]", holder).map((one) => `${one.closest("dd").previousElementSibling.textContent}: ${one.value}`).join("; ");
      for (const svg of all("svg[role=img]", holder)) {
        svg.querySelector("desc").textContent = words;
        drawLanes(svg, state);
      }
    };
    for (const input of inputs) input.addEventListener("input", show);
    holder.querySelector("[data-reset]").addEventListener("click", () => {
      for (const input of inputs) input.value = block.controls.find((control) => control.name === input.dataset.name).value;
      show();
    });
  }
})();
