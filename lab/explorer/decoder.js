// The tokenizer, the decoder and its KV cache, in plain JavaScript. It runs in a web worker, with methods.js.
//
// Read it beside nanollm/model.py and nanollm/slots.py; many names are the same. A matrix is a flat array, row
// by row. Each key/value head stores its entries in arrays of its own, so heads may differ in length.
"use strict";

// ---- tokenizer: byte-level BPE ------------------------------------------------------------------------------

const WORD = / ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|[0-9]{1,2}|\s+(?!\S)|\s+/gu;

class Tokenizer {
  constructor(tokens) {  // each token's bytes in base64, in the order of their ranks
    this.bytes = tokens.map(atob);
    this.rank = new Map(this.bytes.map((bytes, i) => [bytes, i]));
  }
  encode(text) {
    return Array.from(text.matchAll(WORD), ([word]) => this.word(new TextEncoder().encode(word))).flat();
  }
  word(bytes) {
    let parts = Array.from(bytes, byte => String.fromCharCode(byte));
    if (this.rank.has(parts.join(""))) return [this.rank.get(parts.join(""))];
    for (;;) {  // join the neighbours whose token has the lowest rank
      const ranks = parts.slice(1).map((part, i) => this.rank.get(parts[i] + part) ?? Infinity);
      const least = Math.min(...ranks), i = ranks.indexOf(least);
      if (least === Infinity) return parts.map(part => this.rank.get(part));
      parts.splice(i, 2, parts[i] + parts[i + 1]);
    }
  }
  pieces(tokens) {  // one string per token; a character that several tokens share stands at its last token
    const decoder = new TextDecoder(), bytes = token => Uint8Array.from(this.bytes[token], c => c.charCodeAt(0));
    return tokens.map(token => decoder.decode(bytes(token), {stream: true}));
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
      let a = 0, b = 0, c = 0, d = 0;
      for (let i = 0; i < n; i++) {
        const w = W[row * n + i];
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

function add(x, y, n = y.length) { for (let i = 0; i < n; i++) x[i] += y[i]; }

class Decoder {
  // config: sizes, names as in nanollm/model.py. tensors: [name, shape] in the order of the file. The file has
  // all 32-bit numbers first (norms, and one scale for each row of a matrix), then the matrices in 8 bits.
  constructor(config, tensors, file) {
    Object.assign(this, config, {weights: {}});
    this.stride = (this.n_heads + 2 * this.n_kv_heads) * this.head_dim;  // q, k and v of one token
    const floats = tensors.reduce((n, [, shape]) => n + shape[0], 0);
    const scales = new Float32Array(file, 0, floats), codes = new Int8Array(file, 4 * floats);
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
      add(x, linear(caches[layer].attend(qkv, T, start), w("attention.o"), n_heads * head_dim));
      const h = rmsNorm(x, w("norm2"), this.norm_eps);
      const gate = linear(h, w("mlp.gate"), d_model), up = linear(h, w("mlp.up"), d_model);
      for (let i = 0; i < up.length; i++) up[i] *= gate[i] / (1 + Math.exp(-gate[i]));  // SwiGLU
      add(x, linear(up, w("mlp.down"), this.d_ff));
      progress((layer + 1) / this.n_layers);
    }
    return linear(rmsNorm(x.subarray((T - 1) * d_model), weights["norm.weight"], this.norm_eps), embed, d_model);
  }
}

// ---- the KV cache, as in nanollm/slots.py -------------------------------------------------------------------

// Put softmax(q kᵀ/√D) over the slots of `ranges` into p; return their number. The ranges are [from, to) pairs.
function probabilities(p, q, at, k, D, ranges) {
  let n = 0, most = -Infinity, sum = 0;
  for (const [from, to] of ranges)
    for (let slot = from; slot < to; slot++) {
      p[n] = dot(q, at, k, slot * D, D) / Math.sqrt(D);
      most = Math.max(most, p[n++]);
    }
  for (let i = 0; i < n; i++) sum += p[i] = Math.exp(p[i] - most);
  for (let i = 0; i < n; i++) p[i] /= sum;
  return n;
}

// The full cache of one layer. Methods override the rest.
class LayerCache {
  numbers = 0;  // 32-bit numbers that a method stores with each entry

  constructor(decoder, layer, room) {
    Object.assign(this, {decoder, layer, D: decoder.head_dim, seen: 0, p: new Float64Array(room)});
    this.heads = Array.from({length: decoder.n_kv_heads}, () => ({
      n: 0, k: new Float64Array(room * this.D), v: new Float64Array(room * this.D),
      pos: new Int32Array(room), score: new Float64Array(room)}));
  }

  // Store T new tokens; return attention's output, a row of n_heads · D numbers for each.
  attend(qkv, T, start) {
    const {D} = this, y = new Float64Array(T * this.decoder.n_heads * D);
    this.write(qkv, T, start);
    this.read();
    this.attention(qkv, 0, T, (head, t) => [[0, head.n - T + t + 1]], (head, p, n, out) => {
      for (let slot = 0; slot < n; slot++)
        for (let i = 0; i < D; i++) y[out + i] += p[slot] * head.v[slot * D + i];
      this.observe(head, p, n);
    });
    this.evict();
    return y;
  }

  // For the queries of tokens from … to − 1: call use(head, p, n, out) with the attention p to the n slots of
  // ranges(head, t). `out` is the query's place in an array of outputs.
  attention(qkv, from, to, ranges, use) {
    const {D, p, decoder: {stride, n_heads, n_kv_heads}} = this, G = n_heads / n_kv_heads;
    this.heads.forEach((head, h) => {
      for (let t = from; t < to; t++)
        for (let g = h * G; g < (h + 1) * G; g++)
          use(head, p, probabilities(p, qkv, t * stride + g * D, head.k, D, ranges(head, t)), (t * n_heads + g) * D);
    });
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

  newScore() { return 0; }
  read() {}                  // before attention
  observe(head, p, n) {}     // each query's attention
  evict() {}                 // after each call
  look(queries, read) {}     // the prompt's queries, before the compression
  compress(cut, budget) {}   // at the prompt's end

  // Add the attention of the prompt's queries from … to − 1 to the scores.
  addAttention(queries, from, to) {
    this.attention(queries[this.layer], from, to, (head, t) => [[0, t + 1]],
                   (head, p, n) => add(head.score, p, n));
  }
  move(head, from, to) {  // the entry in slot `from` takes the place of that in slot `to`
    for (const x of [head.k, head.v]) x.copyWithin(to * this.D, from * this.D, (from + 1) * this.D);
    for (const x of [head.pos, head.score]) x[to] = x[from];
  }
  keep(head, stays) {  // keep the slots where stays[slot] is true, in order
    let n = 0;
    for (let slot = 0; slot < head.n; slot++) if (stays[slot]) this.move(head, slot, n++);
    head.n = n;
  }
  copy(full, n) {  // take over the first n entries of a full cache
    for (let slot = 0; slot < n; slot++) for (const head of this.heads) head.score[slot] = this.newScore();
    this.heads.forEach((head, h) => {
      for (const x of ["k", "v"]) head[x].set(full.heads[h][x].subarray(0, n * this.D));
      head.pos.set(full.heads[h].pos.subarray(0, head.n = n));
    });
    this.seen = n;
    return this;
  }
  crop(n) {  // forget the newest tokens, so that n are left
    for (const head of this.heads) head.n = n;
    this.seen = n;
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

// As Python's round: halves go to the even number.
const round = x => Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
