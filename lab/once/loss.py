"""Where KVzip and the gates lose needles at 12.5 %: by group of layers given whole, and by head: attention to the asked value's tokens that is evicted."""
import sys, json
sys.path.insert(0, ".")
import torch
from safetensors.torch import load_file
from lab.registry import load, pick, calibrated
from lab.tasks import Tasks
from lab.replay import Recorder, record, replay
from lab.evaluate import prompt_and_question, answer
from nanollm.attention import probabilities
from nanollm.cache import make_cache, compress
from nanollm.ranking import top
torch.set_num_threads(1)
model, encoding = load("smollm2")
tasks = Tasks(encoding, "test")
m = pick(["kvzip", "kvzip_fast"])
keep = .125
GROUPS = [range(g, g + 6) for g in range(0, 30, 6)]
news = load_file("lab/once/news_16.safetensors")
kinds = {"kvzip": (m["kvzip"], {}), "shipped": (m["kvzip_fast"], calibrated(m["kvzip_fast"], model, encoding)), "news_16": (m["kvzip_fast"], news)}
right, mass, lost = {}, 0, {}
with torch.no_grad():
    for part in tasks.batches("needle", 0, 32, 512):
        n = len(part.tokens)
        tokens, context, question = prompt_and_question(model, part)
        T = context.shape[1]
        caches = make_cache(model, Recorder)
        rec = [record(model, caches, x) for x in (context, question)]
        # attention of the question's last token to the fact tokens of the asked value, in the full cache
        stated = torch.from_numpy(part.stated); width = part.answers[0].stop - part.answers[0].start
        at = stated[:, None] + torch.arange(width)[None]  # (B, w): the value's tokens
        full = []
        for layer in range(30):
            k = torch.cat((rec[0][layer].k, rec[1][layer].k), 2)
            pos = torch.arange(k.shape[2]).expand(n, k.shape[1], -1)
            p = probabilities(rec[1][layer].q[:, :, -1:], k, pos, None, torch.tensor([[k.shape[2] - 1]])).amax(2)[:, :, 0]  # (B, H, S)
            full.append(torch.stack([p[b][:, at[b]].sum(-1) for b in range(n)]))  # (B, H)
        full = torch.stack(full, 1)  # (B, L, H)
        mass = mass + full.sum(0)
        for name, (M, o) in kinds.items():
            budget = round(keep * T)
            caches = make_cache(model, M, budget=T, **o); replay(rec[:1], caches)
            scores = type(caches[0]).scores(model, context, caches)
            s = torch.stack(scores, 1)[..., :T]  # (B, L, H, T)
            if name != "kvzip":
                s[..., :4] = torch.inf; s[..., -8:] = torch.inf
            kept = top(s.flatten(1), 30 * 3 * budget).view_as(s)
            gone = torch.stack([(~kept[b][..., at[b]]).float().mean(-1) for b in range(n)])  # (B, L, H)
            lost[name] = lost.get(name, 0) + (full * gone).sum(0)
            for label, whole in [("none", []), ("all", range(30)), *((f"{g.start}–{g.stop-1}", g) for g in GROUPS)]:
                stays = kept.clone()
                for layer in whole: stays[:, layer] = True
                caches = make_cache(model, M, budget=T, **o); replay(rec[:1], caches)
                for c, x in zip(caches, stays.unbind(1)): c.keep_chosen(x)
                right.setdefault((name, label), []).extend(answer(model, tokens, part.answers, part.question, caches).tolist())
for key, y in right.items():
    y = torch.tensor(y); print(*key, round(y.mean().item(), 3), round((y.std() / len(y) ** .5).item(), 3), flush=True)
mass /= 32
order = mass.flatten().argsort(descending=True)[:20]
print("head: attention to the value of the asked needle | lost by", *kinds)
for i in order.tolist():
    l, h = divmod(i, 3); print(f"layer {l} head {h}: {mass[l, h]:.2f} |", *(f"{lost[k][l, h] / 32 / mass[l, h]:.2f}" for k in kinds))
print("all:", mass.sum().item(), *(f"{k}: {(lost[k].sum() / 32 / mass.sum()):.3f}" for k in kinds))
for g in GROUPS: print(g, f"{mass[g.start:g.stop].sum() / mass.sum():.2f}", *(f"{k} {lost[k][g.start:g.stop].sum() / 32 / mass[g.start:g.stop].sum():.2f}" for k in kinds))
