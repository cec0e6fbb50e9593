// Matrices, lines, dots and strips: places on a screen for the numbers of an answer.

// --- matrices

function mix(from, to, share) {
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(part(from, i) + (part(to, i) - part(from, i)) * share)).join(",")})`;
}

const shadeOf = (share) => (dark.matches ? mix("#23303d", "#9cd0ff", share) : mix("#e9f1f9", "#08457e", share));

function drawMatrix(side) {
  const canvas = byId(`${side}-grid`);
  if (!canvas || !canvas.clientWidth) return;
  const [pen, size] = ready(canvas);
  const { positions, rows } = answers[side].matrix;
  const margin = 26;
  const cell = (size - margin) / rows.length;
  const beyond = tone(setup.kinds[2]);
  rows.forEach((row, i) =>
    row.forEach((f, j) => {
      if (f === null) return;
      const [x, y, wide] = [margin + j * cell, i * cell, cell - 0.6];
      const unseen = f < -1e-6 || f >= state.pretrained;
      pen.fillStyle = unseen ? beyond : shadeOf(f / state.pretrained);
      pen.fillRect(x, y, wide, wide);
      if (unseen) {
        pen.strokeStyle = css("--card");
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(x, y + wide);
        pen.lineTo(x + wide, y);
        pen.stroke();
      }
    })
  );
  const wanted = state.context - 1 - distanceNow();
  let column = 0;
  positions.forEach((at, i) => {
    if (Math.abs(at - wanted) < Math.abs(positions[column] - wanted)) column = i;
  });
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 2;
  pen.strokeRect(margin + column * cell - 1, (rows.length - 1) * cell - 1, cell + 1, cell + 1);
  pen.fillStyle = css("--soft");
  pen.font = "12px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.fillText("keys →", margin + (size - margin) / 2, size - 8);
  pen.fillText("0", margin + 5, size - 8);
  pen.textAlign = "right";
  pen.fillText(short(state.context), size - 2, size - 8);
  pen.save();
  pen.translate(14, (size - margin) / 2);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "center";
  pen.fillText("← queries", 0, 0);
  pen.restore();
}

function drawScale() {
  const canvas = byId("scale");
  const pen = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    pen.fillStyle = shadeOf(x / canvas.width);
    pen.fillRect(x, 0, 1, canvas.height);
  }
  byId("scale-end").textContent = `${short(state.pretrained)}, the pretrained length`;
  byId("scale-out").replaceChildren(kindSwatch(2), "beyond, or negative");
}

// --- charts

let clips = 0;

function chart(id, { height = 250, x, y, log = false, ticks, labels = String, bands = [] }) {
  const svg = byId(id);
  const width = Math.max(120, svg.clientWidth);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  const box = { left: 46, right: width - 10, top: 10, bottom: height - 36 };
  const scaleX = (value) => box.left + ((value - x[0]) / (x[1] - x[0])) * (box.right - box.left);
  const bend = log ? Math.log : (value) => value;
  const share = (value) => (bend(value) - bend(y[0])) / (bend(y[1]) - bend(y[0]));
  const scaleY = (value) => box.bottom - share(value) * (box.bottom - box.top);
  const wide = box.right - box.left;
  for (const [low, high] of bands) {
    const height = scaleY(low) - scaleY(high);
    draw(svg, "rect", { class: "band", x: box.left, width: wide, y: scaleY(high), height });
  }
  for (const value of ticks) {
    draw(svg, "path", { class: "grid-line", d: `M${box.left} ${scaleY(value)}H${box.right}` });
    draw(svg, "text", { x: box.left - 6, y: scaleY(value) + 4, "text-anchor": "end" }, labels(value));
  }
  for (let i = 0; i <= 4; i++) {
    const value = x[0] + ((x[1] - x[0]) * i) / 4;
    if (width < 420 && i % 2) continue;
    const anchor = i === 4 ? "end" : i ? "middle" : "start";
    draw(svg, "text", { x: scaleX(value), y: box.bottom + 17, "text-anchor": anchor }, short(value));
  }
  draw(svg, "path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` });
  const clip = draw(svg, "clipPath", { id: `clip-${++clips}` });
  draw(clip, "rect", { x: box.left, y: box.top, width: wide, height: box.bottom - box.top });
  const inside = draw(svg, "g", { "clip-path": `url(#clip-${clips})` });
  const mark = draw(svg, "path", { class: "token", d: "" });
  for (const [, high, text] of bands)
    draw(svg, "text", { class: "halo", x: box.right - 8, y: scaleY(high) + 17, "text-anchor": "end" }, text);
  svg.moveToken = (distance) => mark.setAttribute("d", `M${scaleX(distance)} ${box.top}V${box.bottom}`);
  return { svg, inside, box, scaleX, scaleY };
}

function line(plot, style, points) {
  let path = "";
  let down = false;
  for (const [x, y] of points) {
    if (y === null) down = false;
    else {
      path += `${down ? "L" : "M"}${plot.scaleX(x).toFixed(1)} ${plot.scaleY(y).toFixed(1)}`;
      down = true;
    }
  }
  draw(plot.inside, "path", { class: "curve", d: path, ...stroke(style, 1) });
}

function band(plot, style, points) {
  const known = points.filter(([, low]) => low !== null);
  const place = ([x, y]) => `${plot.scaleX(x).toFixed(1)} ${plot.scaleY(y).toFixed(1)}`;
  const over = known.map(([x, , high]) => place([x, high]));
  const back = known.map(([x, low]) => place([x, low])).reverse();
  if (known.length) draw(plot.inside, "path", { d: `M${[...over, ...back].join("L")}Z`, fill: tone(style), opacity: 0.14 });
}

function under({ svg, box }, text) {
  draw(svg, "text", { x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, text);
}

const describe = (plot, text) => plot.svg.setAttribute("aria-label", text);
const numbersOf = (values) => values.filter((value) => value !== null);

// In drawing order: B first, so that A lies on top.
const inOrder = () => [...good()].reverse();

function showShown() {
  const top = 1.5 * state.pretrained;
  const lowest = Math.min(0, ...good().flatMap((side) => numbersOf(answers[side].shown)));
  const bottom = Math.max(lowest, -state.pretrained);
  const ticks = [-0.5, 0, 0.5, 1, 1.5].map((share) => share * state.pretrained).filter((tick) => tick >= bottom);
  const plot = chart("shown", {
    height: 300, x: [0, state.context], y: [bottom, top], ticks,
    labels: (tick) => (tick < 0 ? `−${short(-tick)}` : short(tick)),
    bands: [[0, state.pretrained, "seen in training"]],
  });
  for (const side of inOrder()) {
    const values = answers[side].shown;
    const count = values.length / 2;
    const points = values.map((f, i) => [((Math.floor(i / 2) + (i % 2 ? 15 / 16 : 0)) / count) * state.context, f]);
    line(plot, look(side), points);
  }
  under(plot, "true distance from the last query (tokens)");
  const ends = good().map((side) => `${state[side].law} ends at ${whole(numbersOf(answers[side].shown).at(-1))}`);
  const seen = `Seen in training: up to ${whole(state.pretrained)}.`;
  describe(plot, `Relative position against distance, up to ${whole(state.context)}. ${ends.join("; ")}. ${seen}`);
}

function hatch(svg) {
  const id = `hatch-${++clips}`;
  const tile = { width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  const pattern = draw(svg, "pattern", { id, ...tile });
  draw(pattern, "rect", { width: 7, height: 7, fill: tone(setup.kinds[2]) });
  draw(pattern, "rect", { width: 2, height: 7, fill: css("--card") });
  return `url(#${id})`;
}

function kindSwatch(number) {
  const svg = sample();
  draw(svg, "rect", { width: 26, height: 10, rx: 2, fill: number === 2 ? hatch(svg) : tone(setup.kinds[number]) });
  return svg;
}

function showStrips() {
  const svg = byId("strips");
  const width = Math.max(120, svg.clientWidth);
  const height = 26 * good().length;
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(1, height)}`);
  svg.setAttribute("height", height);
  const [left, right] = [46, width - 10];
  const place = (distance) => left + (distance / state.context) * (right - left);
  const fills = setup.kinds.map((kind, i) => (i === 2 ? hatch(svg) : tone(kind)));
  const words = [];
  good().forEach((side, row) => {
    for (const [kind, first, last] of answers[side].runs) {
      const number = setup.kinds.findIndex((known) => known.name === kind);
      const wide = Math.max(0.5, place(last + 1) - place(first));
      draw(svg, "rect", { x: place(first), width: wide, y: 26 * row + 4, height: 14, fill: fills[number] });
    }
    draw(svg, "text", { x: left - 6, y: 26 * row + 15, "text-anchor": "end" }, side.toUpperCase());
    words.push(`${state[side].law}: ${answers[side].sentence}`);
  });
  svg.setAttribute("aria-label", `What happens to every distance. ${words.join(" ")}`);
}

function showBound() {
  const values = good().flatMap((side) => ["low", "high"].flatMap((end) => numbersOf(answers[side].bound[end])));
  const top = Math.max(10, ...values) * 1.15;
  const low = Math.max(0.3, 0.8 * Math.min(5, ...values));
  const ticks = [1, 2, 5, 10, 20, 50].filter((tick) => tick >= low && tick <= top);
  const plot = chart("bound", { x: [0, state.context], y: [low, top], log: true, ticks });
  for (const side of inOrder()) {
    const { mean, low, high } = answers[side].bound;
    const at = (i) => ((i + 0.5) / mean.length) * state.context;
    band(plot, look(side), mean.map((_, i) => [at(i), low[i], high[i]]));
    line(plot, look(side), mean.map((value, i) => [at(i), value]));
  }
  under(plot, "true distance (tokens)");
  const falls = good().map((side) => {
    const bound = numbersOf(answers[side].bound.mean);
    return `${state[side].law} from ${bound[0]} to ${bound.at(-1)} on average`;
  });
  describe(plot, `Decay bound against distance: ${falls.join("; ")}.`);
}

function showResolution() {
  const plot = chart("resolution", { x: [0, state.context], y: [-0.3, 1.3], ticks: [0, 0.25, 0.5, 0.75, 1] });
  for (const side of inOrder()) {
    const found = answers[side];
    const ink = tone(look(side));
    found.resolution.forEach((value, i) => {
      if (value === null) return;
      const x = plot.scaleX(found.distance[i]);
      const y = plot.scaleY(Math.max(-0.26, Math.min(1.26, value)));
      const cross = `M${x - 2.6} ${y - 2.6}l5.2 5.2m0 -5.2l-5.2 5.2`;
      if (value > 1.3) draw(plot.inside, "path", { d: `M${x - 4} ${y + 4}h8l-4 -7z`, fill: ink });
      else if (value < -0.3) draw(plot.inside, "path", { d: `M${x - 4} ${y - 4}h8l-4 7z`, fill: ink });
      else if (side === "a") draw(plot.inside, "circle", { cx: x, cy: y, r: 2.4, fill: ink });
      else draw(plot.inside, "path", { d: cross, stroke: ink, "stroke-width": 1.2 });
    });
  }
  under(plot, "true distance (tokens)");
  const told = good().map((side) => `${state[side].law} ${(100 * answers[side].resolved).toFixed(0)} %`).join(", ");
  const count = told && answers[good()[0]].distance.length;
  const key = "Dots are A, crosses B, arrows lie outside.";
  byId("resolved").textContent = told ? `Told apart by 1 or more, of ${count} distances: ${told}. ${key}` : "";
  describe(plot, `Resolution of neighbours against distance. ${byId("resolved").textContent}`);
}

// --- measured

function showMeasured() {
  const measured = setup.measured;
  if (!measured) return;
  const length = Number(byId("length").value);
  const rows = measured.rows.filter((row) => row.length === length);
  const drawn = rows.filter((row) => row.perplexity.length);
  const values = drawn.flatMap((row) => row.perplexity);
  byId("perplexity").style.display = values.length ? "" : "none";
  const names = drawn.map((row) => make("span", {}, swatch(setup.styles[row.law]), row.law));
  byId("measured-laws").replaceChildren(...names);
  if (values.length) {
    const low = Math.min(...values);
    const top = Math.min(Math.max(...values), 10 * low);
    const steps = [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1]];
    const tens = [0.1, 1, 10, 100, 1000, 10000];
    const inside = (tick) => tick >= 0.9 * low && tick <= 1.1 * top;
    const candidates = steps.map((some) => tens.flatMap((ten) => some.map((step) => ten * step)).filter(inside));
    const ticks = candidates.find((some) => some.length <= 6);
    const labels = (tick) => String(+tick.toPrecision(3));
    const y = [0.9 * low, 1.1 * top];
    const plot = chart("perplexity", { height: 280, x: [0, length], y, log: true, ticks, labels });
    for (const row of drawn) line(plot, setup.styles[row.law], row.position.map((at, i) => [at, row.perplexity[i]]));
    under(plot, "position in the window (tokens)");
    const ends = drawn.map((row) => `${row.law} ${row.perplexity.at(-1)}`).join(", ");
    describe(plot, `Perplexity by position at ${whole(length)} tokens, at the end: ${ends}.`);
  }
  const digits = (value) => (value === null ? "–" : value.toFixed(2));
  const found = (row) => (row.passkey_n ? `${row.passkey}/${row.passkey_n}` : "–");
  const cells = (row) => [row.law, ...[row.ppl, row.tail_ppl, row.copy_nll].map(digits), found(row)];
  table("rows", ["law", "ppl", "tail ppl", "copy", "passkey"], rows.map(cells));
}

function buildMeasured() {
  const measured = setup.measured;
  if (!measured) return;
  byId("measured").hidden = false;
  for (const length of measured.lengths)
    byId("length").append(make("option", { value: length, textContent: `${whole(length)} tokens` }));
  byId("length").value = measured.lengths.at(-1);
  byId("length").addEventListener("change", showMeasured);
  byId("measured-note").textContent =
    `${measured.model.name}, pretrained on ${whole(measured.model.pretrained)} tokens, by rpe3d compare. ` +
    "Perplexity of the tokens at each place in the window; the table has whole windows, their last tokens, " +
    "copying (NLL) and passkeys.";
}
