// Six methods, and what the page asks of the worker. It follows decoder.js in the same worker.
//
// Read it beside methods/ and lab/one_page.py. Kept entries, bytes and answers are Python's.
"use strict";

// ---- methods, as in methods/ --------------------------------------------------------------------------------

class ScoredCache extends LayerCache {  // `score(head)` is an array; the lowest leave
  compress(cut, budget) {
    this.budget = budget;
    for (const head of this.heads) if (head.n > budget) this.keep(head, top(this.score(head), budget));
  }
  evict() {  // one entry after each step; of equal scores the oldest leaves
    for (const head of this.heads) {
      if (head.n <= this.budget) continue;
      const score = this.score(head), older = (a, b) => score[a] - score[b] || head.pos[a] - head.pos[b];
      let lowest = 0;
      for (let slot = 1; slot < head.n; slot++) if (older(slot, lowest) < 0) lowest = slot;
      this.move(head, --head.n, lowest);
    }
  }
}

class Random extends ScoredCache {
  numbers = 1;
  random = mersenne(this.layer);
  newScore() { return (this.random() & 0xffffff) / 2 ** 24; }  // as torch.rand
  score(head) { return head.score.subarray(0, head.n); }
}

class StreamingLLM extends ScoredCache {
  score(head) { return Float64Array.from(head.pos.subarray(0, head.n), pos => pos < 4 ? 1e9 - pos : pos); }
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
  look(queries, read) { this.addAttention(queries, 0, read); }  // every query of the prompt counts
  observe(head, p, n) { add(head.score, p, n); }
  score(head) {
    const newest = this.seen - Math.max(1, round(this.budget / 2));
    return head.score.slice(0, head.n).map((x, slot) => head.pos[slot] >= newest ? 1e9 : x);
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
  look(queries, read) {  // the last 8 queries
    this.before = read - 8;
    this.addAttention(queries, this.before, read);
  }
  compress(cut, budget) {
    const {before} = this;
    for (const head of cut > budget ? this.heads : []) {
      const pooled = new Float64Array(before).map((_, slot) =>  // the maximum of 7 neighbours
        Math.max(...head.score.subarray(Math.max(slot - 3, 0), Math.min(slot + 4, before))));
      const stays = top(pooled, budget - (cut - before));
      this.keep(head, Array.from({length: cut}, (_, slot) => slot >= before || stays[slot]));
    }
  }
}

class KVzip extends LayerCache {
  attend(qkv, T, start) {
    const y = super.attend(qkv, T, start), {own, seen} = this, first = Math.min(4, own?.[0]);
    // During the reread: an entry's score is the largest attention that a token of its own piece gives it. The
    // softmax covers the first 4 tokens, the entries that the piece repeats, and the piece up to the query.
    if (own) this.attention(qkv, 0, T, (_, t) => [[0, first], own, [seen - T, seen - T + t + 1]], (head, p) => {
      for (let slot = own[0], i = first; slot < own[1]; slot++, i++)
        head.score[slot] = Math.max(head.score[slot], p[i]);
    });
    return y;
  }
  bytes() {  // heads of unlike length also store their lengths, in 64 bits
    const {heads} = this, unlike = heads.some(head => head.n !== heads[0].n);
    return super.bytes() + (unlike ? 8 * heads.length : 0);
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
  let next = N;
  state[0] = seed;
  for (let i = 1; i < N; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ state[i - 1] >>> 30) + i;
  return () => {
    for (let i = 0; next === N && i < N; i++) {
      const y = state[i] & 0x80000000 | state[(i + 1) % N] & 0x7fffffff;
      state[i] = state[(i + 397) % N] ^ y >>> 1 ^ (y & 1 ? 0x9908b0df : 0);
    }
    let y = state[next = next % N];
    next++;
    y ^= y >>> 11;
    y ^= y << 7 & 0x9d2c5680;
    y ^= y << 15 & 0xefc60000;
    return (y ^ y >>> 18) >>> 0;
  };
}

// ---- a text and a question, as in lab/one_page.py --------------------------------------------------

class Reading {
  // Read text and question once with the full cache. Every method starts from its entries.
  constructor(decoder, tokenizer, text, question, progress) {
    const context = tokenizer.encode(text), tokens = [...context, ...tokenizer.encode(question)];
    Object.assign(this, {decoder, tokenizer, tokens, cut: context.length, rereads: {}});
    if (!this.cut || this.cut === tokens.length) throw Error("Type a text and a question.");
    if (tokens.length > 1500) throw Error(`The text has ${tokens.length} tokens; shorten it to 1500.`);
    this.full = this.caches("full", tokens.length);
    this.queries = this.full.map(() => null);
    this.full.forEach((cache, layer) => {
      const attend = cache.attend;
      cache.attend = (qkv, T, start) => attend.call(cache, this.queries[layer] = qkv, T, start);
    });
    decoder.forward(tokens, 0, this.full, progress);
  }

  caches(method, room) {
    return Array.from({length: this.decoder.n_layers}, (_, l) => new METHODS[method](this.decoder, l, room));
  }

  // Return a method's caches at the prompt's end, and how many tokens the prompt has.
  compressed(method, keep, aware, progress) {
    const cut = aware ? this.tokens.length - 1 : this.cut, budget = round(keep / 100 * this.cut);
    if (method !== "full" && budget < 9) throw Error(`${budget} of ${this.cut} tokens are too few; keep at least 9.`);
    const caches = this.caches(method, this.tokens.length + 80);
    caches.forEach((cache, l) => {
      const read = cut + aware;  // a known question's last token is read, too, then forgotten and fed again
      cache.copy(this.full[l], read);
      cache.look(this.queries, read);
      cache.crop(cut);
    });
    if (method === "kvzip" && cut > budget)
      compressTogether(caches, cut, budget, this.rereads[cut] ??= this.reread(cut, progress));
    else for (const cache of caches) cache.compress(cut, budget);
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
  answer(method, keep, aware, count, progress, step) {
    const [caches, cut] = this.compressed(method, keep, aware, progress), kept = held(caches, cut), written = [];
    let logits, at = cut;
    for (const token of this.tokens.slice(cut)) logits = this.decoder.forward([token], at++, caches);
    for (let i = 0; i < count; i++) {
      written.push(logits.reduce((best, x, token) => x > logits[best] ? token : best, 0));
      if (!step && written.length === count) break;  // as in Python, the last token is not fed
      logits = this.decoder.forward(written.slice(-1), at++, caches);
      step?.(written, caches, at);
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

const NEW = 12;  // tokens of an answer, as in lab/one_page.py
let decoder, tokenizer, reading;

const tasks = {
  load({model, weights}) {
    decoder = new Decoder(model.config, model.tensors, weights);
    tokenizer = new Tokenizer(model.ranks);
  },
  read({text, question}, progress) {
    const begin = performance.now();
    reading = new Reading(decoder, tokenizer, text, question, progress);
    const middle = performance.now(), full = reading.answer("full", 100, false, NEW);
    return {tokens: tokenizer.pieces(reading.tokens), cut: reading.cut, full,
            seconds: [middle - begin, performance.now() - middle].map(ms => ms / 1000)};
  },
  compress: ({method, keep, aware}, progress) => reading.answer(method, keep, aware, NEW, progress),
  play({method, keep, aware, new: count}, progress) {
    const steps = [];
    reading.answer(method, keep, aware, count, progress, (written, caches, n) =>
      steps.push({token: tokenizer.pieces(written).at(-1), kept: held(caches, n), n}));
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
