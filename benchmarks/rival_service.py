"""What `benchmarks/load.py` measures our service against: a plain SASRec behind FastAPI, as one would write it.

torch in inference mode in a thread pool, no batching, no confidences. The history is a Redis list; a request reads it,
encodes it, scores the whole catalogue, leaves the seen items out and returns the best. Run by load.py; settings are
environment variables: RIVAL_PORT, RIVAL_REDIS_URL, RIVAL_ITEMS, RIVAL_THREADS.
"""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import redis.asyncio
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, HIDDEN, MAX_LEN = 64, 2, 2, 256, 50
NUM_ITEMS = int(os.environ["RIVAL_ITEMS"])
THREADS = int(os.environ["RIVAL_THREADS"])


class SASRec(nn.Module):
    """Pre-LN SASRec of torch's own encoder layers; item numbers from 1, 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(NUM_ITEMS + 1, WIDTH)
        self.positions = nn.Embedding(MAX_LEN, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, items_BT: Tensor) -> Tensor:
        length = items_BT.shape[1]
        hidden = self.items(items_BT) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.encoder(hidden, mask=mask, is_causal=True)[:, -1] @ self.items.weight[1:].T


class Asked(BaseModel):
    user_id: str
    num_results: int = 25


class Event(BaseModel):
    user_id: str
    item: int


torch.set_num_threads(THREADS)
torch.manual_seed(0)
model = SASRec().eval()
pool = ThreadPoolExecutor(max(2, THREADS))
store = redis.asyncio.Redis.from_url(os.environ["RIVAL_REDIS_URL"])
app = FastAPI()


@torch.inference_mode()
def best(history: list[int], num_results: int) -> list[tuple[int, float]]:
    scores = model(torch.tensor([history[-MAX_LEN:]]))[0]
    scores[torch.tensor(history) - 1] = -torch.inf
    values, rows = scores.topk(num_results)
    return list(zip((rows + 1).tolist(), values.tolist(), strict=True))


@app.post("/recommendations")
async def recommend(asked: Asked) -> dict[str, object]:
    history = [int(item) for item in await store.lrange(f"rival:{asked.user_id}", 0, -1)]
    ranked = await asyncio.get_running_loop().run_in_executor(pool, best, history, asked.num_results)
    return {"items": [{"item_id": f"item-{item - 1}", "score": score} for item, score in ranked]}


@app.post("/events")
async def append(event: Event) -> dict[str, str]:
    pipeline = store.pipeline()
    pipeline.rpush(f"rival:{event.user_id}", event.item)
    pipeline.ltrim(f"rival:{event.user_id}", -MAX_LEN, -1)
    await pipeline.execute()
    return {"status": "accepted"}


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["RIVAL_PORT"]), log_level="warning", access_log=False)
