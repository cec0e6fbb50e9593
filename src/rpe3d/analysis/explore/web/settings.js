"use strict";
// The page draws what the library answers and computes nothing of a law itself. Here: the settings, and their link.

const setup = JSON.parse(document.getElementById("setup").textContent);
const live = setup.answers === null;
const SIDES = ["a", "b"];
const LABELS = {
  pretrained: "pretrained length",
  context: "context",
  head_dim: "head dimension",
  rope_theta: "rope base",
};
const dark = matchMedia("(prefers-color-scheme: dark)");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const state = { ...setup.start, plane: null, a: { law: "3d-rpe" }, b: { law: "rope" }, token: 300, turn: 0 };
const answers = { a: null, b: null };
let precomputed = null;

const byId = (id) => document.getElementById(id);
const given = (x) => x !== null && x !== undefined;
const figure = (x) => (Number.isInteger(x) ? whole(x) : String(x));
const apart = (x, y) => (x > 0 && y > 0 ? Math.abs(Math.log(x / y)) : Math.abs(x - y));
const whole = (x) => Math.round(x).toLocaleString("en");
const short = (x) => (x >= 1024 && x % 512 === 0 ? `${x / 1024}k` : whole(x));
const tone = (look) => (dark.matches ? look.dark : look.light);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in element && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function draw(parent, tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

// --- settings

const sidesInUse = () => SIDES.filter((side) => state[side].law);
const hasStops = (name) => live || setup.stops[name].length > 0;
const slidersOf = (side) => (state[side].law ? Object.keys(setup.laws[state[side].law].sliders).filter(hasStops) : []);

function read(path) {
  const [side, name] = path.split(".");
  return name ? state[side][name] : state[side];
}

function write(path, value) {
  const [side, name] = path.split(".");
  if (!name) state[side] = value;
  else if (value === null || value === "") delete state[side][name];
  else state[side][name] = value;
}

const least = (stops) => (stops.every(Number.isInteger) ? 1 : "any");

function field(path, label, help, stops, optional) {
  const id = path.replace(".", "-");
  const range = make("input", { type: "range", id, min: 0, max: stops.length - (optional ? 0 : 1), step: 1 });
  const exact = live
    ? make("input", { type: "number", id: `${id}-exact`, min: Math.min(1, ...stops), step: least(stops), "aria-label": `${label}, exactly` })
    : make("output", { id: `${id}-exact`, htmlFor: id });
  range.addEventListener("input", () => {
    const at = Number(range.value);
    write(path, optional && at === 0 ? null : stops[at - (optional ? 1 : 0)]);
    changed();
  });
  if (live) {
    exact.addEventListener("input", () => {
      if (exact.value === "" && !optional) return;
      write(path, exact.value === "" ? null : Number(exact.value));
      changed();
    });
  }
  const row = make("div", { className: "field" }, make("label", { htmlFor: id, textContent: label }), exact, range);
  if (help) {
    row.append(make("small", { id: `${id}-help`, textContent: help }));
    range.setAttribute("aria-describedby", `${id}-help`);
  }
  row.show = () => {
    const value = read(path);
    const side = path.split(".")[1] ? path.split(".")[0] : null;
    const settled = side && answers[side] && !answers[side].error ? answers[side].parameters[path.split(".")[1]] : null;
    let nearest = 0;
    stops.forEach((stop, i) => {
      if (given(value) && apart(stop, value) < apart(stops[nearest], value)) nearest = i;
    });
    range.value = given(value) ? nearest + (optional ? 1 : 0) : 0;
    const words = given(value) ? figure(value) : `default${given(settled) ? `, ${figure(settled)}` : ""}`;
    range.setAttribute("aria-valuetext", words);
    if (!live) exact.value = words;
    else {
      exact.placeholder = given(settled) ? figure(settled) : "default";
      if (document.activeElement !== exact) exact.value = value ?? "";
    }
  };
  return row;
}

const fields = [];

function buildControls() {
  const form = byId("controls");
  form.addEventListener("submit", (event) => event.preventDefault());
  const model = make("details", { className: "group", open: innerWidth > 640 });
  model.append(make("summary", {}, "Model and context"));
  for (const name of setup.model) {
    const row = field(name, LABELS[name], "", setup.stops[name], false);
    fields.push(row);
    model.append(row);
  }
  if (live) {
    const row = field("plane", "plane to look at", "a pair of dimensions; empty: a slow one", [0], true);
    row.querySelector("input[type=range]").remove();
    row.querySelector("label").htmlFor = "plane-exact";
    row.querySelector("input").min = 0;
    row.show = () => {
      const exact = row.querySelector("input");
      const known = SIDES.map((side) => answers[side]).find((found) => found && !found.error);
      exact.placeholder = known ? known.plane : "";
      if (document.activeElement !== exact) exact.value = state.plane ?? "";
    };
    fields.push(row);
    model.append(row);
  }
  form.append(model);
  for (const side of SIDES) {
    const group = make("details", { className: "group", open: true }, make("summary", {}, `Law ${side.toUpperCase()}`));
    const choice = make("select", { id: `${side}-law` });
    if (side === "b") choice.append(make("option", { value: "", textContent: "none" }));
    for (const name of Object.keys(setup.laws)) choice.append(make("option", { value: name, textContent: name }));
    choice.addEventListener("change", () => {
      state[side] = { law: choice.value };
      changed();
    });
    const label = make("label", { htmlFor: choice.id, textContent: "law" });
    const law = make("div", { className: "field select" }, label, choice);
    law.show = () => (choice.value = state[side].law);
    group.append(law);
    fields.push(law);
    for (const name of setup.sliders.filter(hasStops)) {
      const row = field(`${side}.${name}`, name, " ", setup.stops[name], true);
      const show = row.show;
      row.show = () => {
        row.hidden = !slidersOf(side).includes(name);
        row.classList.toggle("field", !row.hidden);
        if (!row.hidden) row.querySelector("small").textContent = setup.laws[state[side].law].sliders[name];
        show();
      };
      group.append(row);
      fields.push(row);
    }
    form.append(group);
  }
}

// --- the link that restores the state

function link() {
  const words = new URLSearchParams();
  for (const name of setup.model) words.set(name, state[name]);
  for (const name of ["plane", "token", "turn"]) if (state[name]) words.set(name, state[name]);
  for (const side of SIDES) {
    words.set(side, state[side].law);
    for (const name of slidersOf(side)) if (given(state[side][name])) words.set(`${side}.${name}`, state[side][name]);
  }
  return `#${words}`;
}

function restore() {
  const words = new URLSearchParams(location.hash.slice(1));
  const number = (name) => {
    const value = Number(words.get(name) || NaN);
    return Number.isFinite(value) ? value : null;
  };
  const allowed = (name, value) => value !== null && (live || setup.stops[name].includes(value));
  for (const name of setup.model) if (allowed(name, number(name))) state[name] = number(name);
  for (const [name, low, high] of [["token", 0, 1000], ["turn", -180, 180]])
    if (number(name) !== null) state[name] = Math.min(high, Math.max(low, number(name)));
  if (live && number("plane") !== null) state.plane = number("plane");
  for (const side of SIDES) {
    const law = words.get(side);
    if (law === null || (law && !(law in setup.laws)) || (!law && side === "a")) continue;
    state[side] = { law };
    for (const name of slidersOf(side)) {
      const value = number(`${side}.${name}`);
      if (allowed(name, value)) state[side][name] = value;
    }
  }
}
