// What the page asks, and says in words and tables.

// --- asking

function question(side) {
  const words = new URLSearchParams({ law: state[side].law });
  for (const name of setup.model) words.set(name, state[name]);
  const own = setup.sliders.filter((name) => slidersOf(side).includes(name) && given(state[side][name]));
  for (const name of own) words.set(name, state[side][name]);
  return words;
}

async function ask(side) {
  const words = question(side);
  if (!live) {
    const found = precomputed.answers[words.toString()];
    const parts = Object.entries(found).map(([name, place]) => [name, precomputed.parts[place]]);
    return Object.fromEntries(parts);
  }
  if (state.plane !== null) words.set("plane", state.plane);
  try {
    return await (await fetch(`api/answer?${words}`)).json();
  } catch {
    const hint = "start `rpe3d explore` again, then reload this page";
    return { error: { problem: "the server does not answer", hint } };
  }
}

async function unpack() {
  const bytes = Uint8Array.from(atob(setup.answers), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  precomputed = JSON.parse(await new Response(stream).text());
}

let asked = 0;
let waiting = null;

function changed() {
  for (const row of fields) row.show();
  clearTimeout(waiting);
  waiting = setTimeout(refresh, live ? 80 : 0);
}

async function refresh() {
  const turn = ++asked;
  document.body.dataset.ready = "no";
  const found = await Promise.all(SIDES.map((side) => (state[side].law ? ask(side) : null)));
  if (turn !== asked) return;
  SIDES.forEach((side, i) => (answers[side] = found[i]));
  for (const row of fields) row.show();
  show();
  keepLink();
  document.body.dataset.ready = "yes";
}

function keepLink() {
  try {
    history.replaceState(null, "", link());
  } catch {
    location.hash = link();
  }
}

// --- words and tables

const look = (side) => setup.styles[state[side].law];
const good = () => sidesInUse().filter((side) => answers[side] && !answers[side].error);

function sample() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const attributes = { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" };
  for (const [name, value] of Object.entries(attributes)) svg.setAttribute(name, value);
  return svg;
}

function stroke(style, scale) {
  const dash = style.dash.map((part) => part * style.width).join(" ");
  return { stroke: tone(style), "stroke-width": scale * style.width, "stroke-dasharray": dash };
}

function swatch(style) {
  const svg = sample();
  draw(svg, "path", { d: "M0 5H26", ...stroke(style, 1.5) });
  return svg;
}

const title = (side) => make("h3", {}, swatch(look(side)), state[side].law);

function showHeads() {
  const box = byId("heads");
  box.replaceChildren();
  box.classList.toggle("one", sidesInUse().length < 2);
  for (const side of sidesInUse()) {
    const found = answers[side];
    const refused = Boolean(found.error);
    const lines = [make("p", { className: "summary", textContent: setup.laws[state[side].law].summary })];
    const said = refused
      ? [`${found.error.problem}.`, `Try: ${found.error.hint}.`]
      : [found.sentence[0].toUpperCase() + found.sentence.slice(1)];
    lines.push(...said.map((text) => make("p", { textContent: text })));
    const look = { className: `head${refused ? " refused" : ""}`, id: `${side}-head` };
    const head = make("div", look, title(side), ...lines);
    if (refused) head.setAttribute("role", "alert");
    box.append(head);
  }
  for (const legend of document.querySelectorAll(".legend.laws"))
    legend.replaceChildren(...good().map((side) => make("span", {}, swatch(look(side)), state[side].law)));
}

function bytes(count) {
  if (count === 0) return "none";
  return count >= 2 ** 20 ? `${+(count / 2 ** 20).toPrecision(3)} MiB` : `${+(count / 1024).toPrecision(3)} KiB`;
}

function table(id, heads, rows) {
  const head = (text, scope) => make("th", { textContent: text, scope });
  const cell = (text) => make("td", { textContent: text });
  const body = rows.map(([first, ...rest]) => make("tr", {}, head(first, "row"), ...rest.map(cell)));
  const top = make("tr", {}, ...heads.map((text) => head(text, "col")));
  byId(id).replaceChildren(make("thead", {}, top), make("tbody", {}, ...body));
}

function showCost() {
  const sides = good();
  const costs = sides.map((side) => answers[side].cost);
  const calls = (count) => (count === null ? "not counted" : count ? whole(count) : "tile by tile");
  const share = (pairs) => (pairs === null ? "–" : `${(100 * pairs).toFixed(0)} %`);
  table("cost", ["", ...sides.map((side) => state[side].law)], [
    ["attention calls", ...costs.map((c) => calls(c.calls))],
    ["pairs computed, of all causal ones", ...costs.map((c) => share(c.pairs))],
    ["turned queries, a query head", ...costs.map((c) => bytes(c.query_bytes))],
    ["turned keys, a key head", ...costs.map((c) => bytes(c.key_bytes))],
  ]);
}

function showCodes() {
  const box = byId("codes");
  box.replaceChildren();
  box.classList.toggle("one", good().length < 2);
  for (const side of good()) {
    const part = make("div", {}, title(side));
    for (const kind of ["code", "command"]) {
      const text = make("code", { id: `${side}-${kind}`, textContent: answers[side][kind] });
      const button = make("button", { type: "button", textContent: "Copy" });
      button.setAttribute("aria-label", `Copy the ${kind === "code" ? "call" : "command"} for ${state[side].law}`);
      button.addEventListener("click", () => copy(text.textContent));
      part.append(make("div", { className: "block" }, make("pre", {}, text), button));
    }
    box.append(part);
  }
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    byId("said").textContent = "Copied.";
  } catch {
    byId("said").textContent = "This browser does not let a page copy: mark the text and copy it yourself.";
  }
  setTimeout(() => (byId("said").textContent = ""), 4000);
}
