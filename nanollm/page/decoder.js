// The tokenizer, the decoder, its KV cache and six methods, in plain JavaScript. It runs in a web worker.
//
// Read it beside nanollm/model.py and nanollm/cache.py: the names are the same, and so are the kept entries
// (tests/commands/test_explore.py compares them). A matrix is a flat array, row by row. Each key/value head
// stores its entries in arrays of its own, so heads may differ in length. New tokens are appended.
"use strict";

// ---- tokenizer: byte-level BPE ------------------------------------------------------------------------------

const WORD = / ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+/gu;

class Tokenizer {
  constructor(tokens) {  // each token's bytes in base64, in the order of their ranks
    this.bytes = tokens.map(atob);
    this.rank = new Map(this.bytes.map((bytes, i) => [bytes, i]));
  }

  encode(text) {
    const out = [];
    for (const [word] of text.matchAll(WORD)) {
      let parts = Array.from(new TextEncoder().encode(word), byte => String.fromCharCode(byte));
      if (this.rank.has(parts.join(""))) parts = [parts.join("")];
      for (;;) {  // join the neighbours whose token has the lowest rank
        const ranks = parts.slice(1).map((part, i) => this.rank.get(parts[i] + part) ?? Infinity);
        const least = Math.min(...ranks), i = ranks.indexOf(least);
        if (least === Infinity) break;
        parts.splice(i, 2, parts[i] + parts[i + 1]);
      }
      for (const part of parts) out.push(this.rank.get(part));
    }
    return out;
  }

  // One string per token. A character that several tokens share stands at its last token.
  pieces(tokens) {
    const decoder = new TextDecoder();
    return tokens.map(token => decoder.decode(Uint8Array.from(this.bytes[token], c => c.charCodeAt(0)),
                                              {stream: true}));
  }
}

// ---- the decoder, as in nanollm/model.py --------------------------------------------------------------------

// x (T rows of n numbers) times the transpose of W (rows of n numbers): T rows. Four rows of x share each
// number of W that is read.
function linear(x, W, n) {
  const T = x.length / n, rows = W.length / n, y = new Float64Array(T * rows);
  let t = 0;
  for (; t + 4 <= T; t += 4) {
    const x0 = t * n, x1 = x0 + n, x2 = x1 + n, x3 = x2 + n;
    for (let row = 0; row < rows; row++) {
      const start = row * n;
      let a = 0, b = 0, c = 0, d = 0;
      for (let i = 0; i < n; i++) {
        const w = W[start + i];
        a += w * x[x0 + i]; b += w * x[x1 + i]; c += w * x[x2 + i]; d += w * x[x3 + i];
      }
      const out = t * rows + row;
      y[out] = a; y[out + rows] = b; y[out + 2 * rows] = c; y[out + 3 * rows] = d;
    }
  }
  for (; t < T; t++)
    for (let row = 0; row < rows; row++) y[t * rows + row] = dot(x, t * n, W, row * n, n);
  return y;
}

function dot(a, i, b, j, n) {
  let sum = 0;
  for (const end = i + n; i < end; i++, j++) sum += a[i] * b[j];
  return sum;
}

function rmsNorm(x, weight, eps) {
  const n = weight.length, y = new Float64Array(x.length);
  for (let t = 0; t < x.length; t += n) {
    const scale = 1 / Math.sqrt(dot(x, t, x, t, n) / n + eps);
    for (let i = 0; i < n; i++) y[t + i] = x[t + i] * scale * weight[i];
  }
  return y;
}

// Rotate the vector x[at … at + D) by RoPE's angles at `pos`. Dimension i pairs with i + D/2.
function rotate(x, at, pos, freq) {
  const half = freq.length;
  for (let i = at; i < at + half; i++) {
    const angle = Math.fround(pos * freq[i - at]), cos = Math.cos(angle), sin = Math.sin(angle);
    [x[i], x[i + half]] = [x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin];
  }
}

const add = (x, y) => { for (let i = 0; i < x.length; i++) x[i] += y[i]; };

class Decoder {
  // config: sizes, names as in nanollm/model.py. tensors: [name, shape] in the order of the file. The file has
  // all 32-bit numbers first (norms, and one scale for each row of a matrix), then the matrices in 8 bits.
  constructor(config, tensors, file) {
    Object.assign(this, config);
    this.stride = (this.n_heads + 2 * this.n_kv_heads) * this.head_dim;  // q, k and v of one token
    const floats = tensors.reduce((n, [, shape]) => n + shape[0], 0);
    const scales = new Float32Array(file, 0, floats), codes = new Int8Array(file, 4 * floats);
    this.weights = {};
    let row = 0, at = 0;
    for (const [name, [rows, n]] of tensors) {
      const w = n ? new Float32Array(rows * n) : scales.slice(row, row + rows);
      for (let i = 0; n && i < w.length; i++) w[i] = codes[at++] * scales[row + Math.floor(i / n)];
      this.weights[name] = w;
      row += rows;
    }
  }

  // Read tokens at positions start, start + 1 …, and return the last token's logits.
  forward(tokens, start, caches, progress = () => {}) {
    const {weights, d_model, head_dim, n_heads, n_kv_heads} = this, T = tokens.length;
    const x = new Float64Array(T * d_model), embed = weights["embed.weight"];
    tokens.forEach((token, t) => x.set(embed.subarray(token * d_model, (token + 1) * d_model), t * d_model));
    for (let layer = 0; layer < this.n_layers; layer++) {
      const w = name => weights[`blocks.${layer}.${name}.weight`];
      const qkv = linear(rmsNorm(x, w("norm1"), this.norm_eps), w("attention.qkv"), d_model);
      for (let t = 0; t < T; t++)
        for (let head = 0; head < n_heads + n_kv_heads; head++)
          rotate(qkv, t * this.stride + head * head_dim, start + t, this.freq);
      const y = caches[layer].attend(qkv, T, start);
      add(x, linear(y, w("attention.o"), n_heads * head_dim));
      progress((layer + 0.3) / this.n_layers);
      const h = rmsNorm(x, w("norm2"), this.norm_eps);
      const gate = linear(h, w("mlp.gate"), d_model), up = linear(h, w("mlp.up"), d_model);
      for (let i = 0; i < up.length; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]));  // SwiGLU
      add(x, linear(up, w("mlp.down"), this.d_ff));
      progress((layer + 1) / this.n_layers);
    }
    return linear(rmsNorm(x.subarray((T - 1) * d_model), weights["norm.weight"], this.norm_eps), embed, d_model);
  }
}

// ---- the KV cache, as in nanollm/cache.py -------------------------------------------------------------------

// Put softmax(q kᵀ/√D) over the slots of `ranges` into p. The ranges are [from, to) pairs, one after another.
function probabilities(p, q, at, k, D, ranges) {
  let n = 0, most = -Infinity, sum = 0;
  for (const [from, to] of ranges)
    for (let slot = from; slot < to; slot++) {
      p[n] = dot(q, at, k, slot * D, D) / Math.sqrt(D);
      most = Math.max(most, p[n++]);
    }
  for (let i = 0; i < n; i++) sum += p[i] = Math.exp(p[i] - most);
  for (let i = 0; i < n; i++) p[i] /= sum;
}

// The full cache of one layer. Methods override `compress` and `evict`.
class LayerCache {
  numbers = 0;  // 32-bit numbers that a method stores with each entry

  constructor(decoder, layer, room) {
    Object.assign(this, {decoder, layer, D: decoder.head_dim, G: decoder.n_heads / decoder.n_kv_heads, seen: 0});
    this.heads = Array.from({length: decoder.n_kv_heads}, () => ({
      n: 0, k: new Float64Array(room * this.D), v: new Float64Array(room * this.D),
      pos: new Int32Array(room), score: new Float64Array(room)}));
    this.p = new Float64Array(room);
  }

  // Store T new tokens; return attention's output, a row of n_heads · D numbers for each.
  attend(qkv, T, start) {
    const {D, G, p, heads} = this, {stride, n_heads} = this.decoder, y = new Float64Array(T * n_heads * D);
    this.write(qkv, T, start);
    this.read();
    heads.forEach((head, h) => {
      for (let t = 0; t < T; t++) {
        const visible = head.n - T + t + 1;  // new slots are the last ones, in order
        for (let g = h * G; g < (h + 1) * G; g++) {
          probabilities(p, qkv, t * stride + g * D, head.k, D, [[0, visible]]);
          const out = (t * n_heads + g) * D;
          for (let slot = 0; slot < visible; slot++)
            for (let i = 0; i < D; i++) y[out + i] += p[slot] * head.v[slot * D + i];
          this.observe(head, p, visible);
        }
      }
    });
    this.evict();
    return y;
  }

  write(qkv, T, start) {
    const {D, heads} = this, {stride, n_heads} = this.decoder;
    for (let t = 0; t < T; t++)
      heads.forEach((head, h) => {
        const k = t * stride + (n_heads + h) * D, v = k + heads.length * D, slot = head.n++;
        head.k.set(qkv.subarray(k, k + D), slot * D);
        head.v.set(qkv.subarray(v, v + D), slot * D);
        head.pos[slot] = start + t;
        head.score[slot] = this.newScore();
      });
    this.seen = start + T;
  }

  // Call each(head, slot, p) for the attention p that the prompt's queries from … to − 1 give to each entry.
  attention(qkv, from, to, each) {
    const {D, G, p} = this, {stride} = this.decoder;
    this.heads.forEach((head, h) => {
      for (let t = from; t < to; t++)
        for (let g = h * G; g < (h + 1) * G; g++) {
          probabilities(p, qkv, t * stride + g * D, head.k, D, [[0, t + 1]]);
          for (let slot = 0; slot <= t; slot++) each(head, slot, p[slot]);
        }
    });
  }

  newScore() { return 0; }
  read() {}
  observe() {}
  evict() {}

  move(head, from, to) {  // the entry in slot `from` takes the place of that in slot `to`
    const {D} = this;
    head.k.copyWithin(to * D, from * D, (from + 1) * D);
    head.v.copyWithin(to * D, from * D, (from + 1) * D);
    head.pos[to] = head.pos[from];
    head.score[to] = head.score[from];
  }

  // Keep the slots where stays[slot] is true, in order.
  keep(head, stays) {
    let n = 0;
    for (let slot = 0; slot < head.n; slot++) if (stays[slot]) this.move(head, slot, n++);
    head.n = n;
  }

  // Take over the first n entries of a full cache.
  copy(full, n) {
    for (let slot = 0; slot < n; slot++)
      this.heads.forEach((head, h) => {
        const from = full.heads[h], part = [slot * this.D, (slot + 1) * this.D];
        head.k.set(from.k.subarray(...part), part[0]);
        head.v.set(from.v.subarray(...part), part[0]);
        head.pos[slot] = slot;
        head.score[slot] = this.newScore();
        head.n = n;
      });
    this.seen = n;
    return this;
  }

  bytes() {  // in 16 bits; a position has 32
    return this.heads.reduce((sum, head) => sum + head.n * (4 * this.D + 4 + 4 * this.numbers), 0);
  }
}

// A mask of the `budget` highest scores. Of equal scores the later one stays.
function top(score, budget) {
  const order = Array.from(score.keys()).sort((a, b) => score[b] - score[a] || b - a);
  const stays = new Uint8Array(score.length);
  for (const i of order.slice(0, budget)) stays[i] = 1;
  return stays;
}

function round(x) {  // as Python: halves go to the even number
  return Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
}

// ---- methods, as in methods/ --------------------------------------------------------------------------------
// `compress(cut, budget, reading)` removes entries at the prompt's end. `evict` removes one after each step.

class ScoredCache extends LayerCache {  // `score(head)` is an array; the lowest leave
  compress(cut, budget) {
    this.budget = budget;
    for (const head of this.heads) if (head.n > budget) this.keep(head, top(this.score(head), budget));
  }

  evict() {
    for (const head of this.heads) {
      if (head.n <= this.budget) continue;
      const score = this.score(head);
      let lowest = 0;
      for (let slot = 1; slot < head.n; slot++)
        if (score[slot] < score[lowest] || score[slot] === score[lowest] && head.pos[slot] < head.pos[lowest])
          lowest = slot;
      this.move(head, --head.n, lowest);
    }
  }

  masked(head, stays) {  // the stored scores; Infinity where stays(position)
    return head.score.slice(0, head.n).map((x, slot) => stays(head.pos[slot]) ? Infinity : x);
  }
}

class Random extends ScoredCache {
  numbers = 1;
  random = mersenne(this.layer);
  newScore() { return (this.random() & 0xffffff) / 2 ** 24; }  // as torch.rand
  score(head) { return this.masked(head, () => false); }
}

class StreamingLLM extends ScoredCache {
  score(head) {
    return Float64Array.from(head.pos.subarray(0, head.n), pos => pos < 4 ? Infinity : pos);
  }

  read() {  // the sinks move up to the window: their keys rotate by the number of dropped tokens
    const {D} = this, dropped = this.seen - this.heads[0].n;
    this.sinks ??= this.heads.map(head => head.k.slice(0, 4 * D));
    this.heads.forEach((head, h) => {
      head.k.set(this.sinks[h]);
      for (let sink = 0; sink < 4; sink++) rotate(head.k, sink * D, dropped, this.decoder.freq);
    });
  }

  bytes() { return super.bytes() + this.heads.length * 4 * this.D * 2; }  // the sinks' own keys
}

class H2O extends ScoredCache {
  numbers = 1;

  compress(cut, budget, {queries}) {  // every query of the prompt counts
    this.attention(queries[this.layer], 0, cut, (head, slot, p) => { head.score[slot] += p; });
    super.compress(cut, budget);
  }

  observe(head, p, n) { for (let slot = 0; slot < n; slot++) head.score[slot] += p[slot]; }

  score(head) {
    const newest = this.seen - Math.max(1, round(this.budget / 2));
    return this.masked(head, pos => pos >= newest);
  }
}

class KeyDiff extends ScoredCache {
  score(head) {  // unlike the mean direction of the keys
    const {D} = this, mean = new Float64Array(D), length = new Float64Array(head.n);
    for (let slot = 0; slot < head.n; slot++) {
      length[slot] = Math.sqrt(dot(head.k, slot * D, head.k, slot * D, D));
      for (let i = 0; i < D; i++) mean[i] += head.k[slot * D + i] / length[slot];
    }
    return length.map((x, slot) => -dot(mean, 0, head.k, slot * D, D) / x);
  }
}

class SnapKV extends LayerCache {
  compress(cut, budget, {queries}) {
    const w = Math.min(8, budget - 1), before = cut - w;
    if (cut <= budget) return;
    this.attention(queries[this.layer], before, cut, (head, slot, p) => { head.score[slot] += p; });
    for (const head of this.heads) {
      const pooled = new Float64Array(before).map((_, slot) =>  // the maximum of 7 neighbours
        Math.max(...head.score.subarray(Math.max(slot - 3, 0), Math.min(slot + 4, before))));
      const stays = top(pooled, budget - w);
      this.keep(head, Array.from({length: cut}, (_, slot) => slot >= before || stays[slot]));
    }
  }
}

class KVzip extends LayerCache {
  attend(qkv, T, start) {
    const y = super.attend(qkv, T, start);
    if (this.own) this.scoreOwn(qkv, T);
    return y;
  }

  // During the reread: an entry's score is the largest attention that a token of its own piece gives it. The
  // softmax covers the first 4 tokens, the entries that the piece repeats, and the piece up to the query.
  scoreOwn(qkv, T) {
    const {D, G, p, own, seen} = this, {stride} = this.decoder, first = Math.min(4, own[0]);
    this.heads.forEach((head, h) => {
      for (let t = 0; t < T; t++)
        for (let g = h * G; g < (h + 1) * G; g++) {
          probabilities(p, qkv, t * stride + g * D, head.k, D, [[0, first], own, [seen - T, seen - T + t + 1]]);
          for (let slot = own[0], i = first; slot < own[1]; slot++, i++)
            head.score[slot] = Math.max(head.score[slot], p[i]);
        }
    });
  }
}

const METHODS = {full: LayerCache, random: Random, streaming_llm: StreamingLLM, h2o: H2O, snap_kv: SnapKV,
                 key_diff: KeyDiff, kvzip: KVzip};

// Keep the entries of all layers and heads with the highest scores, `budget` per head on average.
function compressTogether(caches, cut, budget, scores) {
  const heads = caches.flatMap(cache => cache.heads.map(head => [cache, head]));
  const stays = top(Float64Array.from(scores), heads.length * budget);
  heads.forEach(([cache, head], i) => cache.keep(head, stays.subarray(i * cut, (i + 1) * cut)));
}

// The Mersenne twister with torch's seeding: 32-bit numbers.
function mersenne(seed) {
  const N = 624, state = new Uint32Array(N);
  state[0] = seed;
  for (let i = 1; i < N; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ state[i - 1] >>> 30) + i;
  let next = N;
  return () => {
    if (next === N) {
      for (let i = 0; i < N; i++) {
        const y = state[i] & 0x80000000 | state[(i + 1) % N] & 0x7fffffff;
        state[i] = state[(i + 397) % N] ^ y >>> 1 ^ (y & 1 ? 0x9908b0df : 0);
      }
      next = 0;
    }
    let y = state[next++];
    y ^= y >>> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    return (y ^ y >>> 18) >>> 0;
  };
}

// ---- a text and a question, as in nanollm/commands/demo.py --------------------------------------------------

class Reading {
  // Read text and question once with the full cache. Every method starts from its entries.
  constructor(decoder, tokenizer, text, question, progress) {
    Object.assign(this, {decoder, tokenizer, rereads: {}});
    const context = tokenizer.encode(text);
    this.cut = context.length;
    this.tokens = [...context, ...tokenizer.encode(question)];
    if (!this.cut || this.cut === this.tokens.length) throw Error("Type a text and a question.");
    if (this.tokens.length > 1500) throw Error(`The text has ${this.tokens.length} tokens; shorten it to 1500.`);
    this.full = this.caches("full", 2 * this.tokens.length + 8);
    this.queries = this.full.map(() => null);
    this.full.forEach((cache, layer) => {
      const attend = cache.attend;
      cache.attend = (qkv, T, start) => attend.call(cache, this.queries[layer] = qkv, T, start);
    });
    decoder.forward(this.tokens, 0, this.full, progress);
  }

  caches(method, room) {
    return Array.from({length: this.decoder.n_layers}, (_, l) => new METHODS[method](this.decoder, l, room));
  }

  // Return a method's caches at the prompt's end, and how many tokens the prompt has.
  compressed(method, keep, aware, progress) {
    const cut = aware ? this.tokens.length - 1 : this.cut, budget = round(keep / 100 * this.cut);
    if (method !== "full" && budget < 6) throw Error(`Keep at least 6 of the ${this.cut} tokens.`);
    const caches = this.caches(method, this.tokens.length + 80);
    caches.forEach((cache, l) => cache.copy(this.full[l], cut));
    if (method === "kvzip" && cut > budget)
      compressTogether(caches, cut, budget, this.rereads[cut] ??= this.reread(cut, progress));
    else for (const cache of caches) cache.compress?.(cut, budget, this);
    return [caches, cut];
  }

  // KVzip's scores of all entries, layer by layer, head by head.
  reread(cut, progress) {
    const caches = this.caches("kvzip", 2 * cut + 8).map((cache, l) => cache.copy(this.full[l], cut));
    for (let start = 0; start < cut; start += 512) {
      const end = Math.min(start + 512, cut);
      for (const cache of caches) cache.own = [start, end];
      this.decoder.forward(this.tokens.slice(Math.max(start - 8, 0), end), cut, caches, progress);
      for (const cache of caches) for (const head of cache.heads) head.n = cut;
    }
    return caches.flatMap(cache => cache.heads.flatMap(head => Array.from(head.score.subarray(0, cut))));
  }

  // Compress, feed the rest of the prompt token by token, and write `count` tokens.
  answer(method, keep, aware, count, progress, step = () => {}) {
    const [caches, cut] = this.compressed(method, keep, aware, progress);
    const kept = held(caches, cut), written = [];
    let logits, at = cut;
    for (const token of this.tokens.slice(cut)) logits = this.decoder.forward([token], at++, caches);
    for (let i = 0; i < count; i++) {
      written.push(logits.reduce((best, x, token) => x > logits[best] ? token : best, 0));
      logits = this.decoder.forward(written.slice(-1), at++, caches);
      step(written, caches, at);
    }
    const bytes = caches.reduce((sum, cache) => sum + cache.bytes(), 0);
    return {kept, n: cut, bytes, written, answer: this.tokenizer.pieces(written).join("")};
  }
}

// Which of the first n tokens each head holds: layers · heads · n numbers, 0 or 1.
function held(caches, n) {
  const heads = caches.flatMap(cache => cache.heads), kept = new Uint8Array(heads.length * n);
  heads.forEach((head, h) => head.pos.subarray(0, head.n).forEach(pos => { if (pos < n) kept[h * n + pos] = 1; }));
  return kept;
}

// ---- what the page asks for ---------------------------------------------------------------------------------

let decoder, tokenizer, reading;

const tasks = {
  load({model, weights}) {
    decoder = new Decoder(model.config, model.tensors, weights);
    tokenizer = new Tokenizer(model.ranks);
    return {};
  },

  read({text, question}, progress) {
    const begin = performance.now();
    reading = new Reading(decoder, tokenizer, text, question, progress);
    const middle = performance.now(), full = reading.answer("full", 100, false, 4);
    return {tokens: tokenizer.pieces(reading.tokens), cut: reading.cut, full,
            seconds: [middle - begin, performance.now() - middle].map(ms => ms / 1000)};
  },

  compress({method, keep, aware}, progress) {
    return reading.answer(method, keep, aware, 4, progress);
  },

  play({method, keep, aware, new: count}, progress) {
    const steps = [];
    reading.answer(method, keep, aware, count, progress, (written, caches, n) => {
      steps.push({token: tokenizer.pieces(written).at(-1), kept: held(caches, n), n});
    });
    return {steps};
  },
};

onmessage = ({data: {id, do: task, ...rest}}) => {
  try {
    postMessage({id, reply: tasks[task](rest, progress => postMessage({id, progress}))});
  } catch (error) {
    postMessage({id, error: error.message});
  }
};
