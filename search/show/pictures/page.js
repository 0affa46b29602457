"use strict";
// Draws the timeline and the memory of a stage. The rest of the page is static HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const KINDS = ["F", "B", "I", "W"];
  const KIND_COLOURS = ["kF", "kB", "kI", "kW"];
  const NAMES = {
    F: "forward", B: "backward", I: "input gradients", W: "weight gradients",
  };
  const GIB = 2 ** 30;
  const PIPELINE = data.streams.findIndex(([name]) => name === "pipeline");
  const canvas = document.getElementById("timeline");
  const room = document.getElementById("room");
  const says = document.getElementById("says");
  const chooser = document.getElementById("stage");

  const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  for (const track of data.tracks) {
    track.start = new Float32Array(bytesOf(track.start));
    track.code = new Uint32Array(bytesOf(track.code));
    track.longest = Math.max(...track.length);
    const used = new Set(track.once.map((span) => span[0]));
    if (track.sends.some((time) => time > 0)) used.add(PIPELINE);
    for (const lists of [track.pieces, track.detail])
      for (const pieces of Object.values(lists)) for (const piece of pieces) used.add(piece[0]);
    track.streams = [...used].sort((a, b) => a - b);
  }
  for (const stage of data.memory.stages) {
    stage.at = new Uint16Array(bytesOf(stage.at));
    stage.total = stage.rows.map((row) => row.reduce((sum, size) => sum + size, 0));
  }
  const most = Math.max(
    data.memory.budget, ...data.memory.stages.map((stage) => Math.max(...stage.total)),
  ) * 1.04;

  const view = { from: 0, to: data.step, stage: 0, event: -1 };
  let colours = {};
  let layout = { narrow: false, gutter: 96, width: 0, lanes: [], height: 0 };

  const kindOf = (code) => KINDS[code & 3];
  const chunkOf = (code) => (code >> 2) & 255;
  const batchOf = (code) => code >>> 10;

  function seconds(value) {
    const size = Math.abs(value);
    if (size >= 1) return `${value.toPrecision(4)} s`;
    if (size >= 1e-3) return `${(value * 1e3).toPrecision(4)} ms`;
    return `${(value * 1e6).toPrecision(3)} \u00b5s`;
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    colours = {};
    const names = ["paper", "ink", "quiet", "rule", "wash", "limit", "accent"];
    for (const kind of KINDS) names.push(`k${kind}`);
    for (let i = 0; i < 14; i += 1) names.push(`c${i}`);
    for (let i = 0; i < 10; i += 1) names.push(`m${i}`);
    for (const name of names) colours[name] = style.getPropertyValue(`--${name}`).trim();
  }

  const place = (time) =>
    layout.gutter + ((time - view.from) / (view.to - view.from)) * layout.width;
  const timeAt = (x) =>
    view.from + ((x - layout.gutter) / layout.width) * (view.to - view.from);

  function measure() {
    layout.narrow = canvas.clientWidth < 560;
    layout.gutter = layout.narrow ? 64 : 96;
    layout.width = canvas.clientWidth - layout.gutter - 2;
    const number = data.tracks.length;
    const lane = Math.max(9, Math.min(26, Math.floor(420 / number)));
    layout.lanes = [];
    let y = 20;
    data.tracks.forEach((track, stage) => {
      layout.lanes.push({ stage, y, height: lane, stream: null });
      y += lane + 2;
      if (stage === view.stage) {
        for (const stream of track.streams) {
          layout.lanes.push({ stage, y, height: 14, stream });
          y += 15;
        }
        y += 4;
      }
    });
    layout.height = y + 4;
  }

  function prepared(target, height) {
    const ratio = window.devicePixelRatio || 1;
    const width = target.clientWidth;
    target.style.height = `${height}px`;
    target.width = Math.round(width * ratio);
    target.height = Math.round(height * ratio);
    const pen = target.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  // Index of the first piece of work that may be visible.
  function firstFrom(track, time) {
    let low = 0;
    let high = track.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (track.start[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }
  const firstSeen = (track) => Math.max(0, firstFrom(track, view.from - track.longest) - 1);

  const lengthOf = (track, at) => track.length[track.code[at] & 3];

  function drawAxis(pen, height) {
    const raw = (view.to - view.from) / Math.max(2, Math.floor(layout.width / 90));
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((unit) => unit * power).find((size) => size >= raw);
    pen.textAlign = "center";
    for (let at = Math.ceil(view.from / step) * step; at <= view.to + step * 1e-6; at += step) {
      const x = place(at);
      pen.fillStyle = colours.rule;
      pen.fillRect(x, 16, 1, height - 16);
      pen.fillStyle = colours.quiet;
      const digits = Math.max(0, -Math.floor(Math.log10(step)));
      const words = view.to < 1 ? `${+(at * 1e3).toFixed(4)} ms` : `${at.toFixed(digits)} s`;
      if (x > layout.gutter + 16 && x < layout.gutter + layout.width - 14) pen.fillText(words, x, 8);
    }
  }

  // Spans narrower than two pixels are merged: each pixel column shows time shares by colour.
  class Columns {
    constructor(pen, lane) {
      this.pen = pen;
      this.lane = lane;
      this.column = -1;
      this.colours = [];
      this.shares = [];
    }

    add(colour, x, end) {
      for (let column = Math.floor(x); column < end; column += 1) {
        if (column !== this.column) {
          this.flush();
          this.column = column;
        }
        const share = Math.min(end, column + 1) - Math.max(x, column);
        const at = this.colours.indexOf(colour);
        if (at < 0) {
          this.colours.push(colour);
          this.shares.push(share);
        } else this.shares[at] += share;
      }
    }

    flush() {
      if (!this.colours.length) return;
      let y = this.lane.y + this.lane.height;
      // A fixed order of colours, independent of the order of spans.
      for (const colour of [...this.colours].sort()) {
        const part = Math.min(1, this.shares[this.colours.indexOf(colour)]) * this.lane.height;
        y -= part;
        this.pen.fillStyle = colours[colour];
        this.pen.fillRect(this.column, y, 1, part);
      }
      this.colours.length = 0;
      this.shares.length = 0;
    }
  }

  function drawWork(pen, lane) {
    const track = data.tracks[lane.stage];
    const columns = new Columns(pen, lane);
    for (let at = firstSeen(track); at < track.start.length; at += 1) {
      const start = track.start[at];
      if (start > view.to) break;
      const code = track.code[at];
      const x = Math.max(place(start), layout.gutter);
      const end = Math.min(place(start + track.length[code & 3]), layout.gutter + layout.width);
      if (end < layout.gutter || end <= x) continue;
      const wide = end - x;
      if (wide < 2) {
        columns.add(KIND_COLOURS[code & 3], x, end);
        if (lane.stage !== view.stage || at !== view.event) continue;
      }
      pen.fillStyle = colours[`k${kindOf(code)}`];
      pen.globalAlpha = data.chunks > 1 ? 1 - 0.42 * (chunkOf(code) / data.chunks) : 1;
      pen.fillRect(x, lane.y, wide > 3 ? wide - 0.75 : wide, lane.height);
      pen.globalAlpha = 1;
      if (lane.stage === view.stage && at === view.event) {
        pen.strokeStyle = colours.ink;
        pen.lineWidth = 2;
        pen.strokeRect(x, lane.y, Math.max(wide, 2), lane.height);
      }
      if (wide > 16 && lane.height > 11) {
        const words = wide > 46 && data.chunks > 1
          ? `${batchOf(code)} \u00b7 ${chunkOf(code)}` : `${batchOf(code)}`;
        if (pen.measureText(words).width < wide - 4) {
          pen.fillStyle = "#fff";
          pen.textAlign = "center";
          pen.fillText(words, x + wide / 2, lane.y + lane.height / 2 + 0.5);
        }
      }
    }
    columns.flush();
    for (const span of track.once) {
      const [, , start, end, colour] = span;
      if (end < view.from || start > view.to) continue;
      const x = Math.max(place(start), layout.gutter);
      const wide = Math.min(place(end), layout.gutter + layout.width) - x;
      pen.fillStyle = colours[colour];
      // Overlapped communication is drawn below the computation.
      pen.fillRect(x, lane.y + lane.height * 0.72, Math.max(wide, 0.75), lane.height * 0.28);
      if (!coveredBy(track, start, end))
        pen.fillRect(x, lane.y, Math.max(wide, 0.75), lane.height);
    }
  }

  function coveredBy(track, start, end) {
    const at = firstFrom(track, end) - 1;
    return at >= 0 && track.start[at] + lengthOf(track, at) > start + 1e-9;
  }

  function piecesOf(track, code) {
    const kind = kindOf(code);
    if (batchOf(code) === data.detailed) {
      const detail = track.detail[`${kind}${chunkOf(code)}`];
      if (detail) return detail;
    }
    return track.pieces[kind];
  }

  function drawStream(pen, lane) {
    const track = data.tracks[lane.stage];
    pen.fillStyle = colours.wash;
    pen.fillRect(layout.gutter, lane.y, layout.width, lane.height);
    const right = layout.gutter + layout.width;
    const columns = new Columns(pen, lane);
    for (let at = firstSeen(track); at < track.start.length; at += 1) {
      const start = track.start[at];
      if (start > view.to) break;
      const code = track.code[at];
      const length = track.length[code & 3];
      const send = lane.stream === PIPELINE ? track.sends[code & 3] : 0;
      if (send > 0) {
        const x = Math.max(place(start + length), layout.gutter);
        columns.add("c9", x, Math.min(Math.max(place(start + length + send), x + 0.5), right));
      }
      let done = 0;
      for (const [stream, name, share, colour, layer] of piecesOf(track, code)) {
        const from = done;
        done += share;
        if (stream !== lane.stream) continue;
        const x = Math.max(place(start + from * length), layout.gutter);
        const end = Math.min(place(start + done * length), right);
        if (end <= x) continue;
        if (end - x < 2) {
          columns.add(colour, x, end);
          continue;
        }
        pen.fillStyle = colours[colour];
        pen.fillRect(x, lane.y, end - x > 4 ? end - x - 0.5 : end - x, lane.height);
        if (end - x > 44) {
          const words = layer === null ? name : `${layer} ${name}`;
          if (pen.measureText(words).width < end - x - 4) {
            pen.fillStyle = "#fff";
            pen.textAlign = "center";
            pen.fillText(words, (x + end) / 2, lane.y + lane.height / 2 + 0.5);
          }
        }
      }
    }
    columns.flush();
    for (const [stream, name, start, end, colour] of track.once) {
      if (stream !== lane.stream || end < view.from || start > view.to) continue;
      const x = Math.max(place(start), layout.gutter);
      const wide = Math.min(place(end), right) - x;
      pen.fillStyle = colours[colour];
      pen.fillRect(x, lane.y, Math.max(wide, 0.75), lane.height);
      if (pen.measureText(name).width < wide - 6) {
        pen.fillStyle = "#fff";
        pen.textAlign = "center";
        pen.fillText(name, x + wide / 2, lane.y + lane.height / 2 + 0.5);
      }
    }
  }

  function drawLabels(pen) {
    pen.textAlign = "left";
    const narrow = layout.narrow;
    for (const lane of layout.lanes) {
      pen.fillStyle = colours.paper;
      pen.fillRect(0, lane.y - 1, layout.gutter - 2, lane.height + 2);
      const track = data.tracks[lane.stage];
      if (lane.stream === null) {
        pen.fillStyle = lane.stage === view.stage ? colours.accent : colours.quiet;
        if (lane.height < 10 && lane.stage % 2 && lane.stage !== view.stage) continue;
        const ranks = track.ranks.replace("ranks ", "").replace("rank ", "");
        pen.fillText(narrow ? `${lane.stage}` : `${lane.stage}: ${ranks}`, 2,
          lane.y + lane.height / 2 + 0.5);
      } else {
        pen.fillStyle = colours.quiet;
        const words = data.streams[lane.stream][narrow ? 0 : 1];
        pen.fillText(narrow ? words.slice(0, 8) : words, narrow ? 2 : 8,
          lane.y + lane.height / 2 + 0.5);
      }
    }
    pen.fillStyle = colours.quiet;
    pen.fillText(narrow ? "stage" : "stage: ranks", 2, 8);
  }

  function drawRoom() {
    const height = 150;
    const pen = prepared(room, height);
    const stage = data.memory.stages[view.stage];
    const track = data.tracks[view.stage];
    const top = 18;
    const bottom = height - 4;
    const level = (size) => bottom - (size / most) * (bottom - top);
    const right = layout.gutter + layout.width;
    const column = (row, from, wide) => {
      // Whole pixels, so that no gaps are visible between columns.
      const x = Math.floor(from);
      const across = Math.max(1, Math.ceil(from + wide) - x);
      let sum = 0;
      stage.rows[row].forEach((size, at) => {
        if (size <= 0) return;
        pen.fillStyle = colours[`m${at % 10}`];
        const y = level(sum + size);
        pen.fillRect(x, y, across, level(sum) - y + 0.4);
        sum += size;
      });
    };
    const number = track.start.length;
    const begins = number ? place(track.start[0]) : right;
    if (begins > layout.gutter) column(0, layout.gutter, Math.min(begins, right) - layout.gutter);
    let pending = -1;
    let fullest = 0;
    for (let at = Math.max(0, firstFrom(track, view.from) - 1); at < number; at += 1) {
      if (track.start[at] > view.to) break;
      const ends = at + 1 < number
        ? track.start[at + 1] : track.start[at] + lengthOf(track, at);
      const x = Math.max(place(track.start[at]), layout.gutter);
      const end = Math.min(place(ends), right);
      if (end <= layout.gutter) continue;
      const row = stage.at[at];
      if (end - x < 1) {
        // Of rows that share a pixel column, the one with the largest memory is drawn.
        const here = Math.floor(x);
        if (here !== pending) {
          if (pending >= 0) column(fullest, pending, 1);
          pending = here;
          fullest = row;
        } else if (stage.total[row] > stage.total[fullest]) fullest = row;
        continue;
      }
      if (pending >= 0) column(fullest, pending, 1);
      pending = -1;
      column(row, x, end - x);
    }
    if (pending >= 0) column(fullest, pending, 1);
    const done = number ? place(track.start[number - 1] + lengthOf(track, number - 1)) : right;
    if (done < right) column(0, Math.max(done, layout.gutter), right - Math.max(done, layout.gutter));
    pen.strokeStyle = colours.limit;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(layout.gutter, level(data.memory.budget));
    pen.lineTo(right, level(data.memory.budget));
    pen.stroke();
    pen.fillStyle = colours.quiet;
    pen.textAlign = "left";
    const narrow = layout.narrow;
    pen.fillText(`memory of stage ${view.stage}, limit ${(data.memory.budget / GIB).toFixed(1)} GiB`,
      layout.gutter, 8);
    pen.fillText(narrow ? `${(data.memory.budget / GIB).toFixed(0)}G`
      : `${(data.memory.budget / GIB).toFixed(1)} GiB`, 2, level(data.memory.budget));
    pen.fillText("0", 2, bottom - 6);
  }

  let waiting = false;
  function draw() {
    waiting = false;
    measure();
    const pen = prepared(canvas, layout.height);
    drawAxis(pen, layout.height);
    for (const lane of layout.lanes)
      if (lane.stream === null) drawWork(pen, lane);
      else drawStream(pen, lane);
    drawLabels(pen);
    drawRoom();
  }
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(draw);
  }

  function zoom(factor, x) {
    const centre = x === undefined ? (view.from + view.to) / 2 : timeAt(x);
    const span = Math.min(data.step, Math.max(data.step * 1e-6, (view.to - view.from) * factor));
    const share = (centre - view.from) / (view.to - view.from);
    look(centre - share * span, span);
  }
  function look(from, span) {
    view.from = Math.max(0, Math.min(from, data.step - span));
    view.to = view.from + span;
    redraw();
  }
  const pan = (share) => {
    const span = view.to - view.from;
    look(view.from + share * span, span);
  };

  function choose(stage) {
    view.stage = Math.max(0, Math.min(data.tracks.length - 1, stage));
    view.event = -1;
    chooser.value = String(view.stage);
    showTerms();
    redraw();
  }

  function memoryWords(stage, at) {
    const found = data.memory.stages[stage];
    const row = at < 0 ? 0 : found.at[at];
    return `${(found.total[row] / GIB).toFixed(1)} GiB allocated`;
  }
  function workWords(stage, at) {
    const track = data.tracks[stage];
    const code = track.code[at];
    const chunk = data.chunks > 1 ? `, chunk ${chunkOf(code)}` : "";
    const start = track.start[at];
    const length = lengthOf(track, at);
    return `stage ${stage} (${track.ranks}): ${NAMES[kindOf(code)]} of micro-batch `
      + `${batchOf(code)}${chunk}, ${seconds(start)} to ${seconds(start + length)} `
      + `(${seconds(length)}), ${memoryWords(stage, at)}`;
  }
  function describe(x, y) {
    const lane = layout.lanes.find((one) => y >= one.y && y < one.y + one.height + 2);
    const time = timeAt(x);
    if (!lane || x < layout.gutter) return "";
    const track = data.tracks[lane.stage];
    const at = firstFrom(track, time) - 1;
    const inside = at >= 0 && time < track.start[at] + lengthOf(track, at);
    const spans = track.once.filter(
      (span) => time >= span[2] && time < span[3] && (lane.stream ?? span[0]) === span[0],
    );
    const words = spans.map((span) => {
      const size = span[5] ? `, ${(span[5] / GIB).toFixed(2)} GiB` : "";
      return `${span[1]} (${seconds(span[3] - span[2])}${size})`;
    });
    if (inside) {
      let text = workWords(lane.stage, at);
      if (lane.stream !== null) {
        const share = (time - track.start[at]) / lengthOf(track, at);
        let done = 0;
        for (const [stream, name, part, , layer] of piecesOf(track, track.code[at])) {
          if (share >= done && share < done + part && stream === lane.stream)
            text = `${layer === null ? "" : `layer ${layer}, `}${name} `
              + `(${seconds(part * lengthOf(track, at))}) in ${text}`;
          done += part;
        }
      }
      words.unshift(text);
    } else if (!words.length) words.push(`stage ${lane.stage} (${track.ranks}): idle`);
    return `${seconds(time)}: ${words.join("; ")}`;
  }

  function step(direction) {
    const track = data.tracks[view.stage];
    if (view.event < 0) view.event = firstFrom(track, view.from);
    else view.event = Math.max(0, Math.min(track.start.length - 1, view.event + direction));
    const start = track.start[view.event];
    const span = view.to - view.from;
    if (start < view.from || start > view.to) look(start - span / 2, span);
    says.textContent = workWords(view.stage, view.event);
    redraw();
  }

  // Zooms to the micro-batch of the chosen stage that is known layer by layer.
  function showDetail() {
    const track = data.tracks[view.stage];
    for (let at = 0; at < track.code.length; at += 1)
      if (batchOf(track.code[at]) === data.detailed) {
        const length = lengthOf(track, at);
        look(track.start[at] - 0.05 * length, 1.1 * length);
        view.event = at;
        says.textContent = workWords(view.stage, at);
        return;
      }
  }

  function fillLegend(id, rows) {
    document.getElementById(id).replaceChildren(...rows.map(([name, colour]) => {
      const item = document.createElement("li");
      const key = document.createElement("span");
      key.className = `key ${colour}`;
      item.append(key, name);
      return item;
    }));
  }

  function showTerms() {
    const track = data.tracks[view.stage];
    const found = new Map();
    for (const pieces of Object.values(track.pieces))
      for (const [, name, share, colour] of pieces)
        if (share > 5e-4 && !Object.values(NAMES).includes(name)) found.set(name, colour);
    fillLegend("terms", [...found]);
    const stage = data.memory.stages[view.stage];
    const sizes = data.memory.names.map((name, at) => [name, `m${at % 10}`]);
    fillLegend("sizes", sizes.filter((_, at) => stage.rows.some((row) => row[at] > 0)));
  }

  data.tracks.forEach((track, stage) => {
    chooser.add(new Option(`${stage} (${track.ranks})`, String(stage)));
  });
  chooser.addEventListener("change", () => choose(Number(chooser.value)));
  document.getElementById("in").addEventListener("click", () => zoom(0.5));
  document.getElementById("out").addEventListener("click", () => zoom(2));
  document.getElementById("fit").addEventListener("click", () => look(0, data.step));
  const detail = document.getElementById("detail");
  detail.addEventListener("click", showDetail);
  detail.hidden = !data.tracks.some((track) => Object.keys(track.detail).length);
  const split = data.tracks.some((track) => track.length[2] || track.length[3]);
  for (const item of document.querySelectorAll(".split")) item.hidden = !split;

  canvas.addEventListener("wheel", (event) => {
    // The wheel scrolls the page unless Ctrl or Meta is held or the timeline has the focus.
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / layout.width);
    else zoom(1.0015 ** event.deltaY, event.offsetX);
  }, { passive: false });

  const touches = new Map();
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    touches.set(event.pointerId, event.offsetX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = touches.get(event.pointerId);
    if (before === undefined) {
      says.textContent = describe(event.offsetX, event.offsetY) || "\u00a0";
      return;
    }
    if (touches.size === 2) {
      const [other] = [...touches].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const was = Math.abs(before - other);
      const is = Math.abs(event.offsetX - other);
      if (is > 4 && was > 4) zoom(was / is, (event.offsetX + other) / 2);
    } else pan((before - event.offsetX) / layout.width);
    moved += Math.abs(before - event.offsetX);
    touches.set(event.pointerId, event.offsetX);
  });
  const lifted = (event) => {
    if (touches.delete(event.pointerId) && moved < 4 && event.type === "pointerup") {
      const lane = layout.lanes.find(
        (one) => event.offsetY >= one.y && event.offsetY < one.y + one.height + 2,
      );
      says.textContent = describe(event.offsetX, event.offsetY) || "\u00a0";
      if (lane && lane.stream === null) choose(lane.stage);
    }
  };
  canvas.addEventListener("pointerup", lifted);
  canvas.addEventListener("pointercancel", lifted);

  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    ArrowUp: () => choose(view.stage - 1), ArrowDown: () => choose(view.stage + 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => look(0, data.step), ",": () => step(-1), ".": () => step(1),
  };
  canvas.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });

  const renew = () => { readColours(); redraw(); };
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  matchMedia("print").addEventListener("change", () => { readColours(); draw(); });
  readColours();
  choose(0);
})();
