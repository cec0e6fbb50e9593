// Everything is drawn, and drawn again when something changes.

function show() {
  showHeads();
  const spheres = byId("spheres");
  const matrices = byId("matrices");
  const kept = good().flatMap((side) => [byId(`${side}-globe`), byId(`${side}-grid`)]).filter(Boolean);
  for (const canvas of kept) document.body.append(canvas);
  spheres.replaceChildren();
  matrices.replaceChildren();
  for (const side of good()) {
    const sphere = `Sphere: keys as the last query sees them under ${state[side].law}. ${answers[side].sentence}`;
    canvasFor(spheres, side, "globe", sphere);
    canvasFor(matrices, side, "grid", `Matrix of relative positions that ${state[side].law} shows.`);
  }
  for (const box of [spheres, matrices]) box.classList.toggle("one", good().length < 2);
  const known = good()[0];
  byId("plane-note").textContent = known ? `plane ${answers[known].plane} of ${answers[known].planes}` : "";
  byId("kinds").replaceChildren(...setup.kinds.map((kind, i) => make("li", {}, kindSwatch(i), kind.name)));
  showShown();
  showStrips();
  showBound();
  showResolution();
  drawScale();
  showCost();
  showCodes();
  showMeasured();
  showToken();
}

let playing = false;
let before = 0;

function walk(now) {
  if (!playing) return;
  state.token = (state.token + Math.min(100, now - before) / 24) % 1000;
  before = now;
  showToken();
  requestAnimationFrame(walk);
}

function play(on) {
  playing = on;
  byId("play").textContent = on ? "Pause" : "Play";
  byId("play").setAttribute("aria-pressed", String(on));
  byId("readout").setAttribute("aria-live", on ? "off" : "polite");
  if (on) {
    before = performance.now();
    requestAnimationFrame(walk);
  } else {
    state.token = Math.round(state.token);
    keepLink();
  }
}

async function start() {
  buildControls();
  buildMeasured();
  restore();
  byId("source").textContent = live
    ? "Every number comes from the rpe3d library that runs on this machine."
    : "Every number was computed by the rpe3d library when this file was written; `rpe3d explore` has all settings.";
  byId("token").addEventListener("input", () => {
    if (playing) play(false);
    state.token = Number(byId("token").value);
    showToken();
    keepLink();
  });
  byId("turn").value = state.turn;
  byId("turn-value").value = `${state.turn}°`;
  byId("turn").addEventListener("input", () => setTurn(Number(byId("turn").value)));
  byId("play").addEventListener("click", () => play(!playing));
  byId("link").addEventListener("click", () => {
    keepLink();
    copy(location.href);
  });
  addEventListener("hashchange", () => {
    if (location.hash === link()) return;
    restore();
    changed();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    if (document.body.dataset.ready === "yes") show();
  });
  dark.addEventListener("change", show);
  if (!live) await unpack();
  for (const row of fields) row.show();
  await refresh();
  if (!still.matches) play(true);
}

start();
