"use strict";
// Plays episodes of a robot on canvases, without WebGL: the shapes of its bodies, drawn from far to near.
(() => {
  const MILLIMETRES = 1000, QUATERNION = 8192, TURN = 0.008, LIGHT = [0.35, -0.45, 0.82], NEAR = 0.05;
  const PLAIN = [0.5, 0.5, 0.5], DRAWN_M = 9; // MuJoCo's colour of what has none; tiles of the floor are drawn so far
  const reduced = matchMedia("(prefers-reduced-motion: reduce)");
  let stop = () => {};

  // ---- vectors; quaternions are [w, x, y, z], matrices are rows
  const add = (a, b, scale = 1) => a.map((value, at) => value + scale * b[at]);
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
  const apply = (m, v) => [dot(m[0], v), dot(m[1], v), dot(m[2], v)];
  const times = ([a, b, c, d], [e, f, g, h]) => [a * e - b * f - c * g - d * h, a * f + b * e + c * h - d * g, a * g - b * h + c * e + d * f, a * h + b * g - c * f + d * e];
  const matrix = (q) => {
    const size = Math.hypot(...q) || 1, [w, x, y, z] = q.map((value) => value / size);
    return [[1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)]];
  };

  // ---- shapes of flat faces, of half-size 1: corners in order, seen from outside
  const BOX = [0, 1, 2].flatMap((axis) => [-1, 1].map((side) => [[-1, -1], [1, -1], [1, 1], [-1, 1]].map((pair) => { const corner = [0, 0, 0]; corner[axis] = side; corner[(axis + 1) % 3] = pair[0]; corner[(axis + 2) % 3] = pair[1]; return corner; })));
  const ring = (count, radius, height) => Array.from({ length: count }, (_, at) => [radius * Math.cos((2 * Math.PI * at) / count), radius * Math.sin((2 * Math.PI * at) / count), height]);
  const between = (low, high) => low.map((_, at) => [low[at], low[(at + 1) % low.length], high[(at + 1) % low.length], high[at]]);
  const CYLINDER = [...between(ring(14, 1, -1), ring(14, 1, 1)), ring(14, 1, 1), ring(14, 1, -1)];
  const levels = [-90, -60, -30, 0, 30, 60, 90].map((angle) => ring(12, Math.cos((angle * Math.PI) / 180), Math.sin((angle * Math.PI) / 180)));
  const ELLIPSOID = levels.slice(1).flatMap((high, at) => between(levels[at], high));
  const FACES = {
    box: (size) => [BOX, size], ellipsoid: (size) => [ELLIPSOID, size], cylinder: (size) => [CYLINDER, [size[0], size[0], size[1]]],
  };

  // ---- motion
  const unpacked = async (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Int16Array(await new Response(stream).arrayBuffer());
  };
  const loaded = async (play) => {
    const data = await unpacked(play.data), frames = play.episodes.reduce((sum, count) => sum + count, 0);
    for (let at = 0; at < data.length; at++) if (at % frames) data[at] += data[at - 1]; // wraps around, as the differences do
    const bodies = data.length / 7 / frames;
    const value = (part, body, at) => data[(part * bodies + body) * frames + at];
    const pose = (episode, seconds) => {
      const first = play.episodes.slice(0, episode).reduce((sum, count) => sum + count, 0), last = play.episodes[episode] - 1;
      const at = Math.min(last, Math.max(0, seconds / play.frame_s)), low = Math.floor(at), high = Math.min(last, low + 1);
      const mixed = (part, body) => value(part, body, first + low) * (1 - at + low) + value(part, body, first + high) * (at - low);
      return Array.from({ length: bodies }, (_, body) => ({
        position: [0, 1, 2].map((part) => mixed(part, body) / MILLIMETRES), quaternion: [3, 4, 5, 6].map((part) => mixed(part, body) / QUATERNION),
      }));
    };
    const seconds = (episode) => (play.episodes[episode] - 1) * play.frame_s;
    return { play, pose, seconds, episodes: play.episodes.length };
  };
  const centre = (bodies) => bodies.reduce((sum, body) => add(sum, body.position, 1 / bodies.length), [0, 0, 0]);

  // What a camera looks at in an episode: the robot where it walks away, else the middle of its motion.
  const framing = (one, episode, reach) => {
    const times = Array.from({ length: one.play.episodes[episode] }, (_, at) => at * one.play.frame_s), poses = times.map((time) => one.pose(episode, time));
    const centres = poses.map(centre), middle = centres.reduce((sum, each) => add(sum, each, 1 / centres.length), [0, 0, 0]);
    const drift = Math.max(...centres.map((each) => Math.hypot(...add(each, middle, -1))));
    const spreads = poses.map((pose, at) => Math.max(...pose.map((body) => Math.hypot(...add(body.position, centres[at], -1))))).sort((a, b) => a - b);
    const own = reach + spreads[Math.floor(0.8 * spreads.length)]; // parts that fly off do not make the robot small
    const follows = drift > own, height = Math.max(0, middle[2]);
    const target = (seconds) => {
      if (!follows) return middle;
      const near = [-0.4, -0.2, 0, 0.2, 0.4].map((shift) => centre(one.pose(episode, seconds + shift)));
      return [0, 1].map((axis) => near.reduce((sum, each) => sum + each[axis] / near.length, 0)).concat(height);
    };
    return { target, radius: follows ? own : own + drift };
  };

  // ---- drawing
  const colours = () => {
    const rgb = (name) => paint(name).match(/[\d.]+/g).slice(0, 3).map(Number);
    return { accent: rgb("--accent"), second: rgb("--accent-2"), ink: rgb("--ink"), muted: rgb("--accent-4"), card: rgb("--card") };
  };
  const mixed = (one, other, share) => one.map((value, at) => value * (1 - share) + other[at] * share);
  const css = (rgb, alpha = 1) => `rgb(${rgb.map(Math.round).join(" ")} / ${alpha})`;

  const draw = (canvas, shapes, bodies, view, theme) => {
    const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight, context = canvas.getContext("2d");
    if (canvas.width !== Math.round(width * scale)) { canvas.width = Math.round(width * scale); canvas.height = Math.round(height * scale); }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const { target, radius, yaw, pitch } = view, away = 3.6 * radius, focus = (0.42 * Math.min(width * 0.9, height) * away) / radius;
    const back = [Math.cos(pitch) * Math.cos(yaw), Math.cos(pitch) * Math.sin(yaw), Math.sin(pitch)], eye = add(target, back, away);
    const right = [-Math.sin(yaw), Math.cos(yaw), 0], up = [-Math.sin(pitch) * Math.cos(yaw), -Math.sin(pitch) * Math.sin(yaw), Math.cos(pitch)];
    const seen = (point) => { const to = add(point, eye, -1), far = Math.max(NEAR, -dot(to, back)); return [width / 2 + (focus * dot(to, right)) / far, height * 0.47 - (focus * dot(to, up)) / far, far]; };
    const polygon = (points, fill, stroke) => {
      context.beginPath();
      points.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.closePath();
      if (fill) { context.fillStyle = fill; context.fill(); }
      if (stroke) { context.strokeStyle = stroke; context.lineWidth = 0.8; context.lineJoin = "round"; context.stroke(); }
    };
    // A capsule is two discs and what lies between; a sphere is one with equal ends.
    const capsule = ([x, y, far], [x2, y2, far2], size, fill) => {
      const one = (focus * size) / far, other = (focus * size) / far2, angle = Math.atan2(y2 - y, x2 - x);
      context.beginPath();
      context.arc(x, y, one, angle + Math.PI / 2, angle - Math.PI / 2);
      context.arc(x2, y2, other, angle - Math.PI / 2, angle + Math.PI / 2);
      context.closePath();
      context.fillStyle = fill;
      context.fill();
    };

    const placed = shapes.filter(([kind]) => kind !== "plane").map(([kind, body, position, quaternion, size, colour]) => {
      const at = body ? bodies[body - 1] : { position: [0, 0, 0], quaternion: [1, 0, 0, 0] };
      const turn = matrix(times(at.quaternion, quaternion)), middle = add(at.position, apply(matrix(at.quaternion), position));
      const plain = PLAIN.every((value, channel) => Math.abs(value - colour[channel]) < 0.01);
      const own = plain ? (body ? (kind === "box" ? theme.accent : kind === "sphere" ? theme.second : mixed(theme.muted, theme.ink, 0.25)) : theme.muted) : colour.slice(0, 3).map((value) => value * 255);
      const ends = kind === "capsule" || kind === "sphere" ? [1, -1].map((side) => add(middle, [turn[0][2], turn[1][2], turn[2][2]], side * (kind === "sphere" ? 0 : size[1]))) : null;
      const faces = ends ? [] : FACES[kind]?.(size) ?? FACES.box(size);
      const corners = ends ? [] : faces[0].map((face) => face.map((corner) => add(middle, apply(turn, corner.map((value, axis) => value * faces[1][axis])))));
      return { body, size: size[0], middle, ends, corners, own, alpha: colour[3], far: -dot(add(middle, eye, -1), back) };
    });

    const floor = shapes.find(([kind]) => kind === "plane");
    if (floor) {
      const level = floor[2][2], tile = [0.1, 0.25, 0.5, 1, 2].find((each) => each > radius * 0.45) ?? 4, count = Math.min(DRAWN_M, Math.ceil((3.2 * radius) / tile));
      const middle = target.map((value) => Math.round(value / tile));
      for (let i = middle[0] - count; i <= middle[0] + count; i++) for (let j = middle[1] - count; j <= middle[1] + count; j++) {
        const fade = 1 - Math.hypot((i + 0.5) * tile - target[0], (j + 0.5) * tile - target[1]) / (count * tile);
        if (fade <= 0) continue;
        polygon([[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]].map(([x, y]) => seen([x * tile, y * tile, level])), css(mixed(theme.card, theme.ink, (i + j) % 2 ? 0.13 : 0.05), Math.min(1, 1.6 * fade)));
      }
      const shadow = css(mixed(theme.card, [0, 0, 0], 0.28)), flat = (point) => seen([point[0], point[1], level]);
      for (const each of placed) if (each.body) {
        if (each.ends) capsule(flat(each.ends[0]), flat(each.ends[1]), each.size * 0.9, shadow);
        else for (const face of each.corners) polygon(face.map(flat), shadow);
      }
    }

    placed.sort((one, other) => Boolean(one.body) - Boolean(other.body) || other.far - one.far);
    for (const { ends, corners, size, own, alpha, middle } of placed) {
      context.globalAlpha = alpha;
      if (ends) {
        const [one, other] = ends.map(seen), around = (focus * size) / ((one[2] + other[2]) / 2), angle = Math.atan2(other[1] - one[1], other[0] - one[0]);
        const across = ends[0] === ends[1] || Math.hypot(one[0] - other[0], one[1] - other[1]) < 1 ? [0, 1] : [-Math.sin(angle), Math.cos(angle)], side = across[1] < 0 ? -1 : 1;
        const [x, y] = seen(middle), shade = context.createLinearGradient(x - side * across[0] * around, y - side * across[1] * around, x + side * across[0] * around, y + side * across[1] * around);
        shade.addColorStop(0, css(mixed(own, [255, 255, 255], 0.28)));
        shade.addColorStop(0.45, css(own));
        shade.addColorStop(1, css(mixed(own, [0, 0, 0], 0.42)));
        capsule(one, other, size, shade);
        continue;
      }
      const visible = corners.map((face) => {
        const centreOf = face.reduce((sum, corner) => add(sum, corner, 1 / face.length), [0, 0, 0]), out = add(centreOf, middle, -1), length = Math.hypot(...out) || 1;
        return { face, out: out.map((value) => value / length), far: Math.hypot(...add(centreOf, eye, -1)), turned: dot(out, add(centreOf, eye, -1)) };
      }).filter(({ turned }) => turned < 0).sort((a, b) => b.far - a.far);
      for (const { face, out } of visible) {
        const fill = css(mixed(mixed(own, [0, 0, 0], 0.4), mixed(own, [255, 255, 255], 0.22), 0.5 + 0.5 * dot(out, LIGHT)));
        polygon(face.map(seen), fill, fill);
      }
    }
    context.globalAlpha = 1;
  };

  // ---- the player
  const start = async (home) => {
    stop();
    home.dataset.started = "";
    const { shapes, plays } = JSON.parse(home.querySelector("script").textContent), signal = new AbortController();
    stop = () => signal.abort();
    const loadedPlays = await Promise.all(plays.map(loaded));
    const canvases = [...home.querySelectorAll("canvas")], button = home.querySelector("[data-play]"), scrub = home.querySelector("[data-time]");
    const choice = home.querySelector("[data-episode]"), speed = home.querySelector("[data-speed]"), clock = home.querySelector("output");
    const reach = Math.max(...shapes.map(([kind, body, position, , size]) => (body && kind !== "plane" ? Math.hypot(...position) + Math.max(size[0], size[1]) : 0)));
    let seconds = 0, playing = !reduced.matches, before = 0, theme = colours(), yaw = -1.05, pitch = 0.32, frames = [], length = 0;

    const choose = () => {
      const at = loadedPlays.map((one) => Math.min(Number(choice.value), one.episodes - 1));
      frames = loadedPlays.map((one, each) => framing(one, at[each], reach));
      length = Math.max(...loadedPlays.map((one, each) => one.seconds(at[each])));
      scrub.max = length;
    };
    const show = () => {
      const { radius } = frames.at(-1);
      loadedPlays.forEach((one, at) => {
        const episode = Math.min(Number(choice.value), one.episodes - 1), end = one.seconds(episode), now = Math.min(seconds, end);
        draw(canvases[at], shapes, one.pose(episode, now), { target: frames[at].target(now), radius, yaw, pitch }, theme);
        canvases[at].closest("figure").querySelector(".now").textContent = seconds > end + 1e-6 ? `ended after ${end.toFixed(1)} s` : "";
      });
      scrub.value = seconds;
      clock.textContent = `${Math.min(seconds, length).toFixed(1)} of ${length.toFixed(1)} s`;
      button.textContent = playing ? "Pause" : "Play";
    };
    const tick = (now) => {
      if (signal.signal.aborted) return;
      if (playing && home.clientWidth) {
        seconds += (Math.min(100, now - before) / 1000) * Number(speed.value);
        if (seconds > length + 0.8) seconds = 0; // rests at the end
        show();
      }
      before = now;
      if (playing) requestAnimationFrame(tick);
    };
    const play = (on) => { playing = on; show(); if (on) requestAnimationFrame((now) => { before = now; tick(now); }); };
    const seek = (to) => { seconds = Math.max(0, Math.min(length, to)); play(false); };
    tidemill.keys.p = () => home.clientWidth && play(!playing);
    const on = (node, name, handle) => node.addEventListener(name, handle, { signal: signal.signal });
    on(button, "click", () => play(!playing));
    on(scrub, "input", () => seek(Number(scrub.value)));
    on(choice, "change", () => { seconds = 0; choose(); show(); });
    on(document, "themed", () => { theme = colours(); show(); });
    for (const canvas of canvases) {
      on(canvas, "pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
      on(canvas, "pointermove", (event) => {
        if (!canvas.hasPointerCapture(event.pointerId)) return;
        yaw -= TURN * event.movementX;
        pitch = Math.max(-0.1, Math.min(1.5, pitch + TURN * event.movementY));
        show();
      });
      on(canvas, "keydown", (event) => {
        const step = { ArrowLeft: -0.1, ArrowRight: 0.1, Home: -length, End: length }[event.key];
        if (event.key === " ") play(!playing); else if (step) seek(seconds + step); else return;
        event.preventDefault();
      });
    }
    const sized = new ResizeObserver(() => home.clientWidth && show());
    canvases.forEach((canvas) => sized.observe(canvas));
    choose();
    show();
    play(playing);
  };
  const look = () => { const home = document.querySelector(".episodes:not([data-started])"); if (home) start(home); };
  new MutationObserver(look).observe(document.querySelector("main"), { childList: true, subtree: true });
  look();
})();
