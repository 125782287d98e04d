"""Asks a server: a chat by OpenAI's package (openai), and a prompt as a tensor by NVIDIA's (tritonclient[http]).

python ask.py [http://127.0.0.1:8000]; PAGODA_KEY has the key, if the server needs one."""

import os
import sys

import numpy as np
import tritonclient.http as triton
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = os.environ.get("PAGODA_KEY", "none")

client = OpenAI(base_url=f"{url}/v1", api_key=key)
model = next(model.id for model in client.models.list() if model.kind == "generate")
messages = [{"role": "user", "content": "What is the capital of France?"}]
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=64, stream=True, extra_body={"session": "a conversation"}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

tensors = triton.InferenceServerClient(url.removeprefix("http://"))
prompt = triton.InferInput("text_input", [1], "BYTES")
prompt.set_data_from_numpy(np.array(["Once upon a time"], object))
headers = {"Authorization": f"Bearer {key}"}
answer = tensors.infer(model, [prompt], parameters={"max_tokens": 16}, headers=headers)
print(answer.as_numpy("text_output")[0].decode())
