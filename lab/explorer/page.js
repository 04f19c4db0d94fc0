// What one sees and touches. The decoder runs in a worker (decoder.js); until it has read the text, the page
// shows the results that explore.py stored.
"use strict";

const $ = id => document.getElementById(id);
const all = JSON.parse($("data").textContent);
const beside = all.beside && new URLSearchParams(location.hash.slice(1)).get("model") === all.beside.name;
const data = beside ? all.beside : all;
const TITLE = new Map(data.methods.map(([name, title]) => [name, title]));
const SENTENCE = new Map(data.methods.map(([name, , sentence]) => [name, sentence]));
const FACT = /The code of (\w+) is\s(\d+)/g;

// The tour: each step sets the controls and says one thing.
const TOUR = data.live ? [
  ["A memory of what was read", {left: "full", right: "", keep: 100, aware: true},
   () => `The model has read the text below and stored an entry for each token in each of its ${heads} heads
          (parts that look back). It answers the question at the end by looking up an underlined fact in these entries.`],
  ["Why this memory is large", {left: "full", right: "", keep: 100, aware: true},
   () => `The text has ${data.cut} tokens, and its cache has ${kib(fullBytes())}. In Llama 3 with 8 billion
          parameters one token takes 128 KiB, so a book of 100,000 tokens takes 12 GiB beside the model.`],
  ["Throw out what is old", {left: "full", right: "streaming_llm", keep: 25, aware: true},
   () => `StreamingLLM keeps the first four tokens and the newest; grey tokens are gone. The fact that the
          question asks for is older, so the answer is wrong.`],
  ["Throw out what gets no attention", {left: "streaming_llm", right: "snap_kv", keep: 12.5, aware: true},
   () => `SnapKV looks at which entries the last tokens used, and the question is among these tokens. Half as
          many entries now suffice: the fact stays, and the answer is right.`],
  ["The question comes later", {left: "snap_kv", right: "full", keep: 12.5, aware: false},
   () => `Now the memory is cut before anybody asks, as in a chat with many questions about one text. SnapKV
          cannot know which fact will be needed, drops this one, and answers wrongly.`],
  ["Read twice", {left: "snap_kv", right: "kvzip", keep: 12.5, aware: false},
   () => `KVzip lets the model repeat the text and keeps the entries that it uses for that. Whoever can repeat
          the text has each of its facts, so the facts stay.`],
  ["Keep everything, in few bits", {left: "kvzip", right: "full@2", keep: 12.5, aware: false},
   () => `Another way keeps every entry but rounds its numbers from 16 to 2 bits. The answer stays right; compare
          the two bars of bytes.`],
  ["What it costs", {left: "h2o", right: "kvzip", keep: 12.5, aware: false},
   () => `Small and right has a price in time: H2O read the text once, KVzip twice${state.text ? "" : spent()}.
          The figure below shows all methods, and no point reaches the upper left corner.`],
] : [];

const heads = data.heads[0] * data.heads[1];
const first = data.live ? TOUR[0][1] : {left: "snap_kv", right: "kvzip", keep: 25, aware: false};
const state = {step: 0, token: -1, head: -1, text: "", question: "", ...first};
let reading = {text: data.text, question: data.question, tokens: data.tokens, cut: data.cut};  // what is shown
let shown = {};   // side -> view
let played = {};  // side -> steps of the continuation
let ready = false, seconds = null, ticket = 0;

// ---- numbers and words --------------------------------------------------------------------------------------

const kib = bytes => `${Math.round(bytes / 1024).toLocaleString("en")} KiB`;
const percent = x => `${+(100 * x).toPrecision(2)} %`;
const spent = () => seconds?.reread ? ` (on your machine ${seconds.read.toFixed(1)} s, and ${
  seconds.reread.toFixed(1)} s more)` : "";
const stored = (method, keep, aware) => data.views[`${method} ${keep === 100 ? data.keeps[0] : keep} ${
  aware ? "aware" : "agnostic"}`];
const fullBytes = () => (reading.full ?? stored("full", 100, true)).bytes;

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties))
    name in node ? node[name] = value : node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The facts of the text by name, and whether each token is part of a fact.
function facts() {
  const answers = {}, marked = new Set();
  let at = 0;
  const starts = reading.tokens.map(token => (at += token.length) - token.length);
  for (const found of reading.text.matchAll(FACT)) {
    answers[found[1]] = found[2];
    starts.forEach((start, i) => {
      if (start < found.index + found[0].length && start + reading.tokens[i].length > found.index) marked.add(i);
    });
  }
  return {answers, marked};
}

function expected() {  // what the text says, or if it says nothing, what the full cache answers
  const asked = [...reading.question.matchAll(/The code of (\w+) is/g)].at(-1);
  const said = facts().answers[asked?.[1]];
  if (said !== undefined) return {answer: said, source: "Right answer"};
  return {answer: short((reading.full ?? stored("full", 100, true)).answer), source: "The full cache's answer"};
}

function verdict(answer) {
  const {answer: wanted, source} = expected(), same = short(answer) === wanted;
  if (source === "Right answer") return same ? ": ✓ right." : `: ✗ wrong. The text says ${wanted}.`;
  return same ? ": ✓ as the full cache does." : `: ✗ The full cache answers ${wanted}.`;
}

const short = answer => /^\s*\d+/.exec(answer)?.[0].trim() ?? answer.trim().split("\n")[0];

// ---- the decoder in the worker ------------------------------------------------------------------------------

const waiting = new Map();
let worker;

function ask(message, transfer = []) {
  const id = waiting.size ? Math.max(...waiting.keys()) + 1 : 0;
  worker.postMessage({id, ...message}, transfer);
  return new Promise((resolve, reject) => waiting.set(id, {resolve, reject}));
}

function answered({data: {id, progress, reply, error}}) {
  $("progress").hidden = progress === undefined;
  if (progress !== undefined) return $("progress").value = progress;
  const {resolve, reject} = waiting.get(id);
  waiting.delete(id);
  error ? reject(Error(error)) : resolve(reply);
}

async function start() {
  if (!data.live) return say("Stored results: the model does not run in this page.");
  say("The model is being unpacked …");
  worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent], {type: "text/javascript"})));
  worker.onmessage = answered;
  worker.onerror = event => say(`The model cannot run in this browser (${event.message}); results are stored ones.`);
  const weights = Uint8Array.from(atob($("weights").textContent), c => c.charCodeAt(0)).buffer;
  await ask({do: "load", model: data.model, weights}, [weights]);
  await read(state.text || data.text, state.question || data.question);
}

async function read(text, question) {
  const long = text.length / reading.text.length;  // the time grows faster than the text
  say(`The model reads the text${seconds ? `: about ${Math.ceil(seconds.read * long ** 1.2)} s` : ""} …`);
  $("read").disabled = true;
  const begin = performance.now();
  try {
    const reply = await ask({do: "read", text, question: `\n${question}`});
    reading = {text, question, ...reply};
    seconds = {read: reply.seconds[0], answer: reply.seconds[1]};
    ready = true;
    cache.clear();
    Object.assign(state, text === data.text && question === data.question ? {text: "", question: ""} : {text, question});
    say(`The model has read ${reply.tokens.length} tokens here in ${((performance.now() - begin) / 1000).toFixed(1)} s.`);
    change({token: -1});
  } catch (error) {
    say(error.message);
  }
  $("read").disabled = false;
}

const cache = new Map();  // views that the worker computed

async function view(method, keep, aware) {
  const old = !state.text && stored(method, keep, aware);
  const name = `${method} ${keep} ${aware}`;
  if (!ready || !data.model.methods.includes(method)) {
    if (!old) throw Error(`${TITLE.get(method)} has no stored result here; choose another method or the first text.`);
    return {...old, kept: unpack(old.kept, heads * old.n), live: false};
  }
  if (!cache.has(name)) {
    const begin = performance.now();
    const reply = await ask({do: "compress", method, keep, aware});
    const took = (performance.now() - begin) / 1000;
    if (method === "kvzip" && took > seconds.read / 2) seconds.reread = took;
    cache.set(name, {...reply, live: true});
  }
  return cache.get(name);
}

const unpack = (text, n) => {
  const bytes = atob(text);
  return Uint8Array.from({length: n}, (_, i) => bytes.charCodeAt(i >> 3) >> (i & 7) & 1);
};

// ---- drawing ------------------------------------------------------------------------------------------------

const say = text => { $("status").textContent = text; };
const sides = () => ["left", "right"].filter(side => state[side]);

async function change(more = {}) {
  Object.assign(state, more);
  if (Object.keys(more).some(key => !["token", "head", "step"].includes(key))) played = {};
  controls();
  const mine = ++ticket;
  const late = setTimeout(() => {  // the panels still show the choice before
    for (const panel of document.querySelectorAll(".panel")) panel.classList.add("stale");
    say(`${sides().map(side => TITLE.get(state[side])).join(" and ")}: the model computes …`);
  }, 100);
  try {
    const views = await Promise.all(sides().map(side => view(state[side], state.keep, state.aware)));
    clearTimeout(late);
    if (mine !== ticket) return;
    if (document.querySelector(".stale")) say("The model has computed this here.");
    shown = Object.fromEntries(sides().map((side, i) => [side, views[i]]));
  } catch (error) {
    clearTimeout(late);
    return say(error.message);
  }
  draw();
}

function draw() {
  tour();
  const node = document.activeElement, focus = node?.dataset.focus;  // drawing replaces the focused element
  const {marked} = facts();
  $("panels").replaceChildren(...Object.keys(shown).map(side => panel(side, shown[side], marked)));
  if (focus) document.querySelector(`[data-focus="${focus}"]`)?.focus({preventScroll: true});
  $("asked").replaceChildren(state.aware ? "The text ends with the question " : "Later comes the question ",
    element("b", {}, reading.question),
    ` ${expected().source}: ${expected().answer}. The darker a token, the more heads keep it. `,
    "Underlined: facts. Choose a token to see its heads, or a head to see its tokens.");
  $("curve").replaceChildren(...(data.curve ? [curve("aware", "The question comes with the text"),
                                               curve("agnostic", "The question comes later")] : []));
  cheap();
  address();
}

function controls() {
  $("left").value = state.left;
  $("right").value = state.right;
  $("keep").value = data.keeps.indexOf(state.keep);
  $("keep").disabled = state.keep === 100;
  $("kept-percent").value = `${state.keep} %`;
  for (const radio of document.getElementsByName("setting")) radio.checked = (radio.value === "aware") === state.aware;
  $("moment-label").hidden = !played.left;
  $("play").disabled = !ready;
}

function panel(side, view, marked) {
  const step = played[side]?.[$("moment").value - 1];
  const kept = step?.kept ?? view.kept, n = step?.n ?? view.n;
  const tokens = [...reading.tokens, ...(played[side] ?? []).slice(0, $("moment").value).map(step => step.token)];
  const share = view.bytes / fullBytes();
  const method = state[side];
  return element("section", {className: `panel ${side}`, ariaLabel: `${TITLE.get(method)}, ${side}`},
    element("h3", {}, TITLE.get(method)),
    element("p", {className: "small"}, SENTENCE.get(method) || "stored result",
            view.live || !data.live ? "" : " (stored result)"),
    element("p", {className: "verdict"}, "Answers ", element("b", {}, short(view.answer) || "nothing"),
            verdict(view.answer)),
    element("div", {className: "bar", role: "img", ariaLabel: `${percent(share)} of the full cache`},
            element("i", {style: `width:${100 * Math.min(share, 1)}%`})),
    element("p", {className: "small"}, `${kib(view.bytes)} of ${kib(fullBytes())}: ${percent(share)} of the `,
            "full cache in 16-bit numbers, after the answer"),
    text(side, tokens, kept, n, marked), grid(side, kept, n));
}

function text(side, tokens, kept, n, marked) {
  const spans = tokens.map((token, i) => {
    const count = keeping(kept, n, i), all = state.head < 0 ? heads : 1, share = count / all;
    const name = [i >= n ? "late" : share > .5 ? "some most" : count ? "some" : "",
                  marked.has(i) ? "fact" : "", i === state.token ? "chosen" : ""].join(" ").trim();
    const title = i >= n ? "came after the compression" : `kept by ${count} of ${all} heads`;
    const span = element("span", {className: name, title},
      reading.text === data.text && i < reading.cut ? token.replace("\n", " ") : token);
    span.dataset.token = i;
    span.style.setProperty("--dark", Math.sqrt(share).toFixed(2));
    return span;
  });
  const box = element("div", {className: "tokens", tabIndex: 0, role: "group",
    ariaLabel: "the text; the arrow keys choose a token"}, ...spans);
  box.dataset.focus = `${side} text`;
  box.onclick = event => { if (event.target.dataset.token) choose(+event.target.dataset.token); };
  box.onkeydown = event => {
    const by = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10}[event.key];
    if (event.key === "Escape") choose(-1);
    if (!by) return;
    event.preventDefault();
    choose(Math.min(Math.max(state.token + by, 0), reading.tokens.length - 1));
  };
  return box;
}

function choose(token) {
  change({token: token === state.token ? -1 : token, head: -1});
  const counts = sides().map(side => shown[side] && token >= 0 && token < shown[side].n &&
    `${TITLE.get(state[side])}: ${keeping(shown[side].kept, shown[side].n, token)} of ${heads} heads`);
  if (token >= 0) say(`Token “${reading.tokens[token]}” is kept by ${counts.filter(Boolean).join("; ") || "all, for it came later"}.`);
}

// In how many heads (or in the chosen head) a token is kept.
function keeping(kept, n, token) {
  if (state.head >= 0) return kept[state.head * n + token];
  let count = 0;
  for (let head = 0; head < heads; head++) count += kept[head * n + token];
  return count;
}

function grid(side, kept, n) {
  const [layers, width] = data.heads;
  const box = element("div", {className: "grid", role: "group", ariaLabel: "heads: layers in rows",
                              style: `grid-template-columns: 4.5rem repeat(${width}, 1fr)`});
  for (let layer = 0; layer < layers; layer++) {
    box.append(element("span", {className: "small"}, `layer ${layer}`));
    for (let head = layer * width; head < (layer + 1) * width; head++) {
      const part = kept.subarray(head * n, (head + 1) * n), token = state.token;
      const share = token >= 0 && token < n ? part[token] : part.reduce((sum, x) => sum + x, 0) / n;
      const label = token >= 0 && token < n ? (share ? "kept" : "gone") : percent(share);
      const cell = element("button", {type: "button", className: share > .5 ? "most" : "", ariaPressed: head === state.head,
        ariaLabel: `layer ${layer}, head ${head - layer * width}: ${label}`,
        onclick: () => change({head: head === state.head ? -1 : head, token: -1})}, label);
      cell.dataset.focus = `${side} ${head}`;
      cell.style.setProperty("--dark", Math.sqrt(share).toFixed(2));
      box.append(cell);
    }
  }
  return box;
}

function svg(tag, properties, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Accuracy over bytes, in one setting.
function curve(setting, title) {
  const W = 420, H = 270, low = Math.min(...data.curve.map(row => row.share)) * .9;
  const x = share => 45 + (W - 60) * Math.log(share / low) / Math.log(1.3 / low), y = right => H - 40 - (H - 65) * right;
  const path = points => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const out = svg("svg", {viewBox: `0 0 ${W} ${H}`, role: "img",
    "aria-label": `${title}: right answers over bytes of ${data.curve.length} measurements`});
  out.append(svg("text", {x: 45, y: 14, "font-weight": "bold"}, title));
  for (const tick of [0, .5, 1])
    out.append(svg("path", {class: "axis", d: path([[low, tick], [1.3, tick]])}),
               svg("text", {x: 40, y: y(tick) + 4, "text-anchor": "end"}, percent(tick)));
  for (const tick of [.02, .05, .1, .2, .5, 1].filter(tick => tick > low))
    out.append(svg("text", {x: x(tick), y: H - 24, "text-anchor": "middle"}, percent(tick)));
  out.append(svg("text", {x: W / 2, y: H - 6, "text-anchor": "middle"}, "bytes, as a share of the full cache's"));
  const point = (row, side) => svg("circle", {cx: x(row.share), cy: y(row[setting]), r: side ? 5 : 3, class: side},
    svg("title", {}, `${row.method}, ${row.keep} %: ${percent(row[setting])} right, ${percent(row.share)} of the bytes`));
  out.append(...data.curve.map(row => point(row, "")));
  for (const side of sides()) {
    const rows = data.curve.filter(row => row.method === state[side]).sort((a, b) => a.share - b.share);
    if (!rows.length) continue;
    out.append(svg("path", {class: side, d: path(rows.map(row => [row.share, row[setting]]))}),
               ...rows.map(row => point(row, side)));
    const last = rows[0], below = side === "right" ? 18 : -9;
    out.append(svg("text", {x: x(last.share) + 10, y: y(last[setting]) + below, "text-anchor": last.share > .5 ? "end" : "start"},
                   TITLE.get(state[side])));
  }
  return out;
}

function cheap() {
  const bits = Math.ceil(Math.log2(data.vocab)), bytes = Math.ceil(reading.cut * bits / 8);
  $("cheap").textContent = `The ${reading.cut} tokens of this text, with ${bits} bits for each, are ${bytes} bytes. The ` +
    `full cache has ${Math.round(fullBytes() / bytes).toLocaleString("en")} times as many. ` + (seconds ?
    `But without a cache the model reads the text again for every answer: on your machine that takes ${
      seconds.read.toFixed(1)} s. With the cache an answer takes ${seconds.answer.toFixed(2)} s.` : "");
}

// ---- tour, address, controls --------------------------------------------------------------------------------

function tour() {
  if (!TOUR.length) return $("tour").hidden = true;
  const [title, , words] = TOUR[state.step];
  $("tour-count").textContent = `Tour, ${state.step + 1} of ${TOUR.length}`;
  $("tour-title").textContent = title;
  $("tour-text").textContent = words();
  $("back").disabled = !state.step;
  $("next").disabled = state.step === TOUR.length - 1;
}

function go(by) {
  const step = state.step + by;
  change({step, token: -1, head: -1, ...TOUR[step][1]});
  $("tour-title").focus({preventScroll: true});
}

function address() {
  const own = state.text ? {text: state.text, question: state.question} : beside ? {model: data.name} : {};
  const {step, left, right, keep, aware, token, head} = state;
  history.replaceState(null, "", "#" + new URLSearchParams(
    {step: step + 1, left, right, keep, asked: aware ? "known" : "later", token, head, ...own}));
}

function ownText() { [$("text").value, $("question").value] = [state.text || data.text, state.question || data.question]; }

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const take = (name, allowed, key = name) => { if (given.has(name) && allowed(given.get(name))) state[key] = given.get(name); };
  take("left", name => TITLE.has(name));
  take("right", name => !name || TITLE.has(name));
  take("text", () => data.live);
  take("question", () => data.live);
  const number = (name, most, least = -1) => {
    const x = Number(given.get(name) ?? NaN);
    if (Number.isInteger(x) && x >= least && x <= most) state[name] = x;
  };
  number("token", data.tokens.length - 1);
  number("head", heads - 1);
  if (given.has("step")) { number("step", TOUR.length, 1); state.step = Math.max(Number(given.get("step")) - 1 || 0, 0); }
  state.step = Math.min(state.step, Math.max(TOUR.length - 1, 0));
  if ([100, ...data.keeps].includes(Number(given.get("keep")))) state.keep = Number(given.get("keep"));
  if (given.has("asked")) state.aware = given.get("asked") === "known";
  ownText();
}

async function play() {
  $("play").disabled = true;
  try {
    const steps = [];
    for (const side of sides())
      steps.push(data.model.methods.includes(state[side]) ?
        (await ask({do: "play", method: state[side], keep: state.keep, aware: state.aware, new: 64})).steps : undefined);
    played = Object.fromEntries(sides().map((side, i) => [side, steps[i]]));
    $("moment").value = $("moment-count").value = 64;
  } catch (error) {
    say(error.message);
  }
  controls();
  draw();
}

const budget = () => state.keep === 100 ? {keep: 25} : {};  // the tour's first steps keep everything
for (const side of ["left", "right"]) {
  $(side).append(...(side === "right" ? [new Option("none", "")] : []),
                 ...data.methods.map(([name, title]) => new Option(title, name)));
  $(side).onchange = () => change({[side]: $(side).value, ...budget()});
}
$("keep").max = data.keeps.length - 1;
$("keep").oninput = () => change({keep: data.keeps[$("keep").value]});
for (const radio of document.getElementsByName("setting"))
  radio.onchange = () => change({aware: radio.value === "aware"});
$("back").onclick = () => go(-1);
$("next").onclick = () => go(1);
$("read").onclick = () => read($("text").value.trimEnd(), $("question").value);
$("restore").onclick = () => {
  Object.assign(state, {text: "", question: ""});
  ownText();
  read(data.text, data.question);
};
$("play").onclick = play;
$("moment").oninput = () => { $("moment-count").value = $("moment").value; draw(); };
$("own").hidden = $("time").hidden = !data.live;
$("decoder-label").hidden = !all.beside;
$("decoder").append(new Option(`${all.name}, which runs in this page`, ""),
                    new Option(`${all.beside?.name}, stored results`, all.beside?.name, beside, beside));
$("decoder").onchange = () => {
  location.hash = $("decoder").value && `model=${$("decoder").value}`;
  location.reload();
};
$("curves").hidden = !data.curve;
$("controls").onsubmit = event => event.preventDefault();
onhashchange = () => { fromAddress(); change(); };
$("model").textContent = `The model: ${data.name}, ${data.heads[0]} layers with ${data.heads[1]} key/value heads each.`;
fromAddress();
change();
addEventListener("DOMContentLoaded", () => setTimeout(start, 50));
