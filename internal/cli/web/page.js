// The page of gpctl web. It polls "data", whose values are text as gpctl prints it, and shows
// them as text: nothing of it becomes markup.
"use strict";

const pollTime = 500; // ms
const answerTime = 30000; // ms, after which an answer no longer counts
const columns = 600; // of the timeline, a tenth of a second each

const $ = (id) => document.getElementById(id);

let newest = -1; // column
let selected = ""; // target_id
let last = null; // data
// The figures of each row of the timeline, by key, for the last `columns` columns.
let kept = new Map();

// el returns an element with text, class and children.
function el(tag, options = {}, ...children) {
  const e = document.createElement(tag);
  if (options.class) e.className = options.class;
  if (options.text !== undefined) e.textContent = options.text;
  if (options.title) e.title = options.title;
  e.append(...children);
  return e;
}

// setText changes text only when it differs, so that a selection by the reader stays.
function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

function show(e, visible) {
  e.hidden = !visible;
}

// extend adds the figures of new columns to a row, n for each column.
function extend(key, figures, n, data) {
  let row = kept.get(key);
  if (!row) {
    row = { n, list: new Array(columns * n).fill(0), until: data.first - 1 };
    kept.set(key, row);
  }
  const added = data.column - data.first + 1;
  if (added <= 0) return;
  row.list.push(...(figures || new Array(added * n).fill(0)));
  row.list.splice(0, row.list.length - columns * n);
  row.until = data.column;
}

// merge adds an answer to what is kept. An answer that does not continue it replaces it.
function merge(data) {
  if (data.first !== newest + 1) kept = new Map();
  extend("away", data.away, 1, data);
  for (const g of data.gpus) {
    extend("gpu " + g.id, g.columns, 2, data);
    extend("begun " + g.id, g.begun, 1, data);
  }
  for (const t of data.tracks) extend("target " + t.id, t.columns, 3, data);
  for (const [key, row] of kept) {
    if (row.until === data.column) continue;
    extend(key, null, row.n, data);
    if (row.list.every((v) => v === 0)) kept.delete(key);
  }
  newest = data.column;
}

// colour returns a colour of the style sheet.
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// prepare sizes a canvas for the screen and returns what draws on it.
function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  return { g, width, height };
}

// drawRow draws the columns of a row: for each pixel the mean share of each level, stacked from
// below. What is not 0 has at least a pixel.
function drawRow(canvas, key, levels) {
  const { g, width, height } = prepare(canvas);
  const row = kept.get(key), away = kept.get("away");
  const bars = Math.max(1, Math.min(columns, Math.floor(width)));
  const step = width / bars;
  for (let i = 0; i < bars; i++) {
    const from = Math.floor((i * columns) / bars), to = Math.max(from + 1, Math.floor(((i + 1) * columns) / bars));
    const mean = (r, level) => {
      if (!r) return 0;
      let sum = 0;
      for (let c = from; c < to; c++) sum += r.list[c * r.n + level];
      return sum / (to - from) / 100;
    };
    const x = i * step, w = step + 0.5;
    if (mean(away, 0) > 0) {
      g.fillStyle = colours.away;
      g.globalAlpha = 0.45;
      g.fillRect(x, 0, w, height);
      g.globalAlpha = 1;
    }
    let y = height;
    levels.forEach((name, level) => {
      const share = mean(row, level);
      if (share === 0) return;
      const h = Math.min(y, Math.max(1.5, share * height));
      g.fillStyle = colours[name];
      g.fillRect(x, y - h, w, h);
      y -= h;
    });
  }
}

let colours = {};

function readColours() {
  colours = {};
  for (const name of ["quiet", "waiting", "suspended", "changing", "quarantined", "away"]) colours[name] = colour(name);
}

const leaseLevels = ["waiting", "quiet"], targetLevels = ["changing", "suspended", "quarantined"];

// drawn are the canvases of the timeline with what each draws.
let drawn = [];

function draw() {
  for (const d of drawn) drawRow(d.canvas, d.key, d.levels);
  if (last) drawQuiet(last.quiet.recent);
}

function drawQuiet(list) {
  const canvas = $("quiet-chart");
  const { g, width, height } = prepare(canvas);
  if (list.length === 0) return;
  const most = Math.max(...list, 0.001);
  const step = Math.min(12, width / list.length);
  g.fillStyle = colours.quiet;
  list.forEach((v, i) => {
    const h = Math.max(1.5, Math.sqrt(v / most) * (height - 2)); // a late one must not hide the others
    g.fillRect(i * step, height - h, Math.max(1, step - 1.5), h);
  });
}

// figuresAt describes a column of a row, for the pointer.
function figuresAt(d, x) {
  const i = Math.min(columns - 1, Math.max(0, Math.floor((x / d.canvas.clientWidth) * columns)));
  const row = kept.get(d.key);
  const ago = ((columns - 1 - i) / 10).toFixed(1);
  const parts = d.levels.map((name, level) => `${d.words[level]} ${row ? row.list[i * row.n + level] : 0}%`);
  const begun = d.begun && kept.get(d.begun);
  if (begun) parts.push(`${begun.list[i]} began`);
  return `${d.name}, ${ago} s ago: ${parts.join(", ")}`;
}

// layout is the rows that the timeline has; it is built again only when they change.
let layout = "";

function timeline(data) {
  const rows = data.gpus.map((g) => ({
    gpu: g,
    tracks: data.tracks.filter((t) => t.gpus.includes(g.id)),
  }));
  const next = JSON.stringify(rows.map((r) => [r.gpu.id, r.gpu.name, r.tracks.map((t) => [t.id, t.comm, t.gone])]));
  if (next !== layout) {
    layout = next;
    drawn = [];
    $("timeline").replaceChildren(...rows.map((r) => gpuRows(r.gpu, r.tracks)));
    if (rows.length === 0) $("timeline").replaceChildren(el("p", { class: "empty", text: "This host has no GPU nodes." }));
  }
  for (const g of data.gpus) {
    const facts = $("gpu-" + g.id);
    const texts = [
      `GPU ${g.id}`,
      `queues ${g.queues}/${g.slots}`,
      `leases ${g.leases}`,
      `suspended ${g.suspended}% of the last 10 s`,
      g.breaker ? `breaker open for ${g.breaker}` : "",
    ];
    texts.forEach((text, i) => setText(facts.children[i + 1], text));
  }
}

function gpuRows(g, tracks) {
  const head = el("h3", {}, el("b", { text: `#${g.index} ${g.name}` }), el("span"), el("span"), el("span"), el("span"), el("span", { class: "alarm" }));
  head.id = "gpu-" + g.id;
  const add = (name, title, d) => {
    const canvas = el("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", title);
    const entry = { canvas, name: title, ...d };
    drawn.push(entry);
    const point = (e) => setText($("at"), figuresAt(entry, e.offsetX));
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    return el("div", { class: "row" }, el("span", { class: "name", text: name, title }), canvas);
  };
  return el("div", { class: "gpu" }, head,
    add("leases", `leases on GPU ${g.id}`, { key: "gpu " + g.id, begun: "begun " + g.id, levels: leaseLevels, words: ["not quiet", "quiet"] }),
    ...tracks.map((t) => add(`${t.pid} ${t.comm}${t.gone ? " (ended)" : ""}`, `target ${t.pid} ${t.comm}`,
      { key: "target " + t.id, levels: targetLevels, words: ["changing", "suspended", "quarantined"] })),
    el("div", { class: "axis" }, el("span", { text: "60 s ago" }), el("span", { text: "40 s" }), el("span", { text: "20 s" }), el("span", { text: "now" })));
}

// table shows a list as rows that are kept between answers by their key: cells is a list of
// [text or element, class] in the order of the head.
function table(id, list, key, cells, empty) {
  const t = $(id), body = t.tBodies[0];
  const names = [...t.tHead.rows[0].cells].map((c) => c.textContent);
  const old = new Map([...body.rows].filter((r) => r.dataset.key).map((r) => [r.dataset.key, r]));
  const rows = list.map((item) => {
    let row = old.get(key(item));
    if (!row) {
      row = el("tr");
      row.dataset.key = key(item);
      names.forEach((name, i) => {
        const td = el("td", { class: t.tHead.rows[0].cells[i].className });
        td.dataset.name = name;
        row.append(td);
      });
    }
    cells(item).forEach((value, i) => {
      const td = row.cells[i];
      if (typeof value === "function") value(td);
      else setText(td, value);
      td.classList.toggle("none", td.textContent === "" || td.textContent === "-");
    });
    return row;
  });
  if (rows.length === 0) {
    const td = el("td", { class: "empty", text: empty });
    td.colSpan = names.length;
    rows.push(el("tr", {}, td));
  }
  return { body, rows };
}

// place replaces the rows of a table only when they differ.
function place(body, rows) {
  if (rows.length !== body.rows.length || rows.some((r, i) => r !== body.rows[i])) body.replaceChildren(...rows);
}

function state(text) {
  return (td) => {
    if (!td.firstChild) td.append(el("span", {}, el("i"), el("span")));
    const chip = td.firstChild;
    chip.className = "state " + text;
    setText(chip.lastChild, text);
  };
}

function targets(data) {
  const { body, rows } = table("targets", data.targets, (t) => t.id, (t) => [
    String(t.pid),
    (td) => {
      if (!td.firstChild) {
        const button = el("button", { class: "open", title: "explain" });
        button.type = "button";
        button.addEventListener("click", () => select(t.id));
        td.append(button);
      }
      td.firstChild.setAttribute("aria-expanded", String(selected === t.id));
      setText(td.firstChild, t.comm);
    },
    t.class, state(t.state), t.suspended === "-" ? "-" : t.suspended + "%", t.rate, String(t.queues), t.backlog, t.gpus, t.where || "-", t.why,
  ], "No process has GPU queues.");
  const at = rows.findIndex((r) => r.dataset.key === selected);
  if (at >= 0) rows.splice(at + 1, 0, detail(data.explanation));
  else selected = "";
  place(body, rows);
}

let detailRow = null, detailText = "";

// detail returns the row that explains the selected target.
function detail(e) {
  const text = JSON.stringify([selected, e]);
  if (detailRow && text === detailText) return detailRow;
  const td = el("td");
  td.colSpan = 11;
  if (!e || e.id !== selected) td.append(el("p", { class: "note", text: "Asking the daemon..." }));
  else if (e.error) td.append(el("p", { class: "banner bad", text: e.error }));
  else {
    td.append(el("p", { class: "verdict", text: e.verdict }), el("pre", { text: e.facts }));
    td.append(el("h3", { text: "Checks, the first that does not pass decides" }), checks(e.checks));
    if (e.class.length > 0) td.append(el("h3", { text: "Class, the first that matches decides" }), checks(e.class));
    if (e.queues.length > 0) {
      td.append(el("h3", { text: "Queues" }), rowsOf(e.queues.map((q) => [[String(q.id), "n"], [`GPU ${q.gpu}`], [q.type], [q.ring, "n"], [q.backlog, "n"]])));
    }
  }
  const row = el("tr", { class: "detail" }, td);
  detailRow = row;
  detailText = text;
  return row;
}

function checks(list) {
  const t = rowsOf(list.map((c) => [[c.name], [c.result], [c.detail]]));
  list.forEach((c, i) => t.rows[i].classList.toggle("decides", c.decides));
  return t;
}

function rowsOf(list) {
  return el("table", {}, el("tbody", {}, ...list.map((cells) => el("tr", {}, ...cells.map(([text, name]) => el("td", { text, class: name || "" }))))));
}

function select(id) {
  selected = selected === id ? "" : id;
  if (last) targets({ ...last, explanation: null });
  poll();
}

function render(data) {
  last = data;
  const d = data.daemon;
  setText($("model"), d.model === "" ? "" : d.model.toUpperCase() + ": no hardware is involved");
  show($("model"), d.model !== "");
  setText($("about"), `${d.backend}, policy ${d.policy}, gpreemptd ${d.version}, up ${d.up}`);
  lost(data.lost);

  const drained = { code: "DRAINING", text: "nothing is suspended", remedy: "gpctl drain off ends it" };
  const banners = d.draining ? [drained, ...data.warnings] : data.warnings;
  const warnings = JSON.stringify(banners);
  if ($("warnings").dataset.shown !== warnings) {
    $("warnings").dataset.shown = warnings;
    $("warnings").replaceChildren(...banners.map((w) =>
      el("p", { class: w.error ? "banner bad" : "banner" }, el("b", { text: w.code }), ` ${w.text}; ${w.remedy}`)));
  }

  const q = data.quiet;
  const pairs = q.count === 0 ? [["p50", "-"], ["p95", "-"], ["p99", "-"], ["max", "-"]] : [["p50", q.p50], ["p95", q.p95], ["p99", q.p99], ["max", q.max]];
  if ($("quiet").children.length === 0) $("quiet").append(...pairs.map(([name]) => el("div", {}, el("dt", { text: name }), el("dd"))));
  pairs.forEach(([, value], i) => setText($("quiet").children[i].lastChild, value));
  setText($("quiet-note"), q.count === 0 ? "No announcement seen yet." : `Last ${q.count} announcements; bars on a square-root scale.`);

  const some = (list, word) => `${list.length} ${word}`;
  const suspended = data.targets.filter((t) => t.state === "suspended"), offline = data.targets.filter((t) => t.class === "offline");
  setText($("n-targets"), String(data.targets.length));
  setText($("n-targets-note"), `${some(offline, "offline")}, ${some(suspended, "suspended")}`);
  setText($("n-leases"), String(data.leases.length));
  setText($("n-leases-note"), `${some(data.leases.filter((l) => l.state === "held"), "quiet")}`);
  setText($("n-queues"), String(data.gpus.reduce((n, g) => n + g.queues, 0)));
  setText($("n-queues-note"), `of ${data.gpus.reduce((n, g) => n + g.slots, 0)} slots`);

  timeline(data);
  targets(data);
  const leases = table("leases", data.leases, (l) => l.id, (l) => [l.id, l.label, state(l.state), l.priority, l.gpus, l.owner, l.age, l.expires], "No live leases.");
  place(leases.body, leases.rows);
  const preemptions = table("preemptions", data.preemptions, (p) => p.at + p.pid, (p) => [p.at, p.pid, p.comm, p.took, p.for], "None seen yet.");
  place(preemptions.body, preemptions.rows);
  draw();
}

// lost shows why the figures are old, or that they are not.
function lost(why) {
  setText($("lost"), why);
  show($("lost"), why !== "");
  $("link").classList.toggle("lost", why !== "");
  setText($("link-text"), why === "" ? "live" : "not connected");
  $("main").classList.toggle("stale", why !== "");
}

let polling = null;

// poll asks for data and renders it. One request is made at a time.
async function poll() {
  if (polling) return;
  polling = true;
  try {
    const query = new URLSearchParams({ after: String(newest) });
    if (selected) query.set("target", selected);
    const answer = await fetch("data?" + query, { signal: AbortSignal.timeout(answerTime) });
    if (!answer.ok) throw new Error(await answer.text());
    const data = await answer.json();
    merge(data);
    render(data);
  } catch (e) {
    lost(e instanceof TypeError ? "gpctl web does not answer. If it has ended, run it again and open the address that it prints." : String(e.message));
  } finally {
    polling = null;
  }
}

readColours();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
addEventListener("resize", draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
setInterval(() => { if (!document.hidden) poll(); }, pollTime);
poll();
