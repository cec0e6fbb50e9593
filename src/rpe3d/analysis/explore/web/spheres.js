// The walking token, and the two spheres that it walks on.

// --- the walking token

const distanceNow = () => Math.round((state.token / 1000) * (state.context - 1));

function kindAt(found, distance) {
  const run = found.runs.find(([, first, last]) => distance >= first && distance <= last);
  return run ? run[0] : "";
}

// Read off the line that is drawn: a number, or two where it has teeth that are too narrow for one.
function shownAt(found, distance) {
  const count = found.shown.length / 2;
  const place = (distance / state.context) * count;
  const bucket = Math.min(count - 1, Math.floor(place));
  const [first, second] = found.shown.slice(2 * bucket, 2 * bucket + 2);
  if (first === null) return "leaves it out";
  const slope = Math.abs(second - first) / (state.context / count);
  const near = (value) => whole(Number(value.toPrecision(3)));
  const [low, high] = [Math.min(first, second), Math.max(first, second)];
  if (slope > 1.1 || second < first) return `shows ${near(low)} to ${near(high)} around here`;
  return `shows about ${near(first + ((second - first) * (place - bucket) * 16) / 15)}`;
}

function showToken() {
  const distance = distanceNow();
  byId("token").value = state.token;
  byId("token-value").value = whole(distance);
  byId("token").setAttribute("aria-valuetext", `${whole(distance)} tokens back`);
  const parts = good().map((side) => {
    const found = answers[side];
    return `${state[side].law} ${shownAt(found, distance)} (${kindAt(found, distance)})`;
  });
  byId("readout").textContent = `A key ${whole(distance)} tokens back: ${parts.join("; ")}.`;
  for (const side of good()) {
    drawGlobe(side);
    drawMatrix(side);
  }
  for (const id of ["shown", "strips", "bound", "resolution"]) byId(id).moveToken?.(distance);
}

// --- spheres

const LIFT = (20 * Math.PI) / 180;

function canvasFor(box, side, kind, label) {
  let canvas = byId(`${side}-${kind}`);
  if (!canvas) {
    canvas = make("canvas", { id: `${side}-${kind}`, className: kind });
    canvas.setAttribute("role", "img");
    if (kind === "globe") dragToTurn(canvas);
  }
  canvas.setAttribute("aria-label", label);
  const part = make("div", {}, title(side), canvas);
  box.append(part);
  return canvas;
}

function ready(canvas) {
  const scale = devicePixelRatio || 1;
  const size = canvas.clientWidth;
  const side = Math.round(size * scale);
  canvas.width = canvas.height = side; // empties it, and the pen forgets its last settings
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  return [pen, size];
}

function dragToTurn(canvas) {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    from = { x: event.clientX, turn: state.turn };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!from) return;
    let turn = from.turn + (event.clientX - from.x) / 2;
    turn = ((((turn + 180) % 360) + 360) % 360) - 180;
    setTurn(Math.round(turn));
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (from = null));
}

function setTurn(degrees) {
  state.turn = degrees;
  byId("turn").value = degrees;
  byId("turn-value").value = `${degrees}°`;
  for (const side of good()) drawGlobe(side);
  keepLink();
}

function drawGlobe(side) {
  const canvas = byId(`${side}-globe`);
  if (!canvas || !canvas.clientWidth) return;
  const [pen, size] = ready(canvas);
  const found = answers[side];
  const radius = 0.42 * size;
  const seen = Math.min(found.trained, 2 * Math.PI);
  // The middle of what training has seen faces the eye.
  const facing = seen / 2 + (state.turn * Math.PI) / 180;
  const place = (longitude, latitude) => {
    const across = Math.cos(latitude) * Math.cos(longitude - facing);
    const right = Math.cos(latitude) * Math.sin(longitude - facing);
    const up = Math.sin(latitude) * Math.cos(LIFT) - across * Math.sin(LIFT);
    const depth = Math.sin(latitude) * Math.sin(LIFT) + across * Math.cos(LIFT);
    return [size / 2 + radius * right, size / 2 - radius * up, depth];
  };
  const shade = pen.createRadialGradient(0.4 * size, 0.34 * size, 0.05 * size, size / 2, size / 2, 1.1 * radius);
  shade.addColorStop(0, css("--card"));
  shade.addColorStop(1, css("--tint"));
  pen.beginPath();
  pen.arc(size / 2, size / 2, radius, 0, 7);
  pen.fillStyle = shade;
  pen.fill();
  const step = Math.PI / 36;
  pen.fillStyle = css("--band");
  for (let west = 0; west < seen - 1e-9; west += step) {
    const east = Math.min(seen, west + step);
    for (let south = -Math.PI / 2; south < Math.PI / 2 - 1e-9; south += 2 * step) {
      const north = south + 2 * step;
      const corners = [place(west, south), place(east, south), place(east, north), place(west, north)];
      if (corners.some(([, , depth]) => depth < 0)) continue;
      pen.beginPath();
      corners.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.closePath();
      pen.fill();
      pen.strokeStyle = pen.fillStyle;
      pen.lineWidth = 0.7;
      pen.stroke();
    }
  }
  const path = (points, colour, width, dash = []) => {
    for (const front of [false, true]) {
      pen.beginPath();
      let down = false;
      points.forEach(([x, y, depth]) => {
        const here = depth >= 0 === front;
        if (here && down) pen.lineTo(x, y);
        else pen.moveTo(x, y);
        down = here;
      });
      pen.globalAlpha = front ? 1 : 0.22;
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.lineCap = "round";
      pen.setLineDash(dash);
      pen.stroke();
    }
    pen.globalAlpha = 1;
    pen.setLineDash([]);
  };
  const round = Array.from({ length: 73 }, (_, i) => (i * Math.PI) / 36);
  for (const degrees of [-60, -30, 0, 30, 60]) {
    const parallel = round.map((t) => place(t, (degrees * Math.PI) / 180));
    path(parallel, css("--line"), degrees ? 0.6 : 1.1);
  }
  for (let i = 0; i < 12; i++) {
    const meridian = round.slice(0, 37).map((t) => place((i * Math.PI) / 6, t - Math.PI / 2));
    path(meridian, css("--line"), 0.5);
  }
  pen.beginPath();
  pen.arc(size / 2, size / 2, radius, 0, 7);
  pen.strokeStyle = css("--soft");
  pen.lineWidth = 1;
  pen.stroke();

  let nearest = null;
  const distance = distanceNow();
  const sphere = found.sphere;
  if (sphere.chunks) {
    const firsts = sphere.angle.map((angles, ring) => [angles[0], sphere.height[ring]]);
    const climb = firsts.filter(([angle]) => angle !== null).map(([angle, height]) => place(angle, height));
    path(climb, css("--soft"), 0.8, [1, 4]);
  }
  // The farthest first, so that near keys lie on top where a law goes round more than once.
  for (let ring = sphere.distance.length - 1; ring >= 0; ring--) {
    const height = sphere.height[ring];
    for (let i = sphere.distance[ring].length - 1; i >= 0; i--) {
      const [at, angle] = [sphere.distance[ring][i], sphere.angle[ring][i]];
      if (angle === null) continue;
      const point = place(angle, height);
      if (!nearest || Math.abs(at - distance) < Math.abs(nearest.at - distance)) nearest = { at, point };
      const next = sphere.angle[ring][i + 1];
      if (next === undefined || next === null) continue;
      const kind = Math.max(sphere.kind[ring][i], sphere.kind[ring][i + 1]);
      // A key's angle goes on round the sphere between two samples, however far.
      const pieces = Math.min(60, Math.max(2, Math.ceil(Math.abs(next - angle) / 0.08)));
      const line = Array.from({ length: pieces + 1 }, (_, n) => place(angle + ((next - angle) * n) / pieces, height));
      path(line, tone(setup.kinds[kind]), 4, kind === 2 ? [2, 5] : []);
    }
  }
  const dot = ([x, y, depth], colour, large) => {
    pen.globalAlpha = depth >= 0 ? 1 : 0.4;
    pen.beginPath();
    pen.arc(x, y, large, 0, 7);
    pen.fillStyle = colour;
    pen.fill();
    pen.lineWidth = 2;
    pen.strokeStyle = css("--card");
    pen.stroke();
    pen.globalAlpha = 1;
  };
  const label = (text, [x, y]) => {
    pen.font = "13px system-ui, sans-serif";
    pen.textAlign = x > size * 0.7 ? "right" : "left";
    pen.lineWidth = 4;
    pen.strokeStyle = css("--card");
    pen.fillStyle = css("--ink");
    const shift = x > size * 0.7 ? -11 : 11;
    pen.strokeText(text, x + shift, y - 8);
    pen.fillText(text, x + shift, y - 8);
  };
  const query = place(0, sphere.height[0]);
  dot(query, css("--ink"), 6);
  label("query", query);
  if (nearest && kindAt(found, distance) !== "not attended") {
    dot(nearest.point, css("--mark"), 7.5);
    if (Math.hypot(nearest.point[0] - query[0], nearest.point[1] - query[1]) > 40) label("key", nearest.point);
  }
}
