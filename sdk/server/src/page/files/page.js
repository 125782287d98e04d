"use strict";

const KEPT = 300;
const by = (id) => document.getElementById(id);
const state = { next: 0, seconds: [], models: [], names: "", key: sessionStorage.getItem("key") || "" };

// ---- requests ------------------------------------------------------------------------------------------------------

function ask(path, options = {}) {
  const headers = state.key ? { Authorization: `Bearer ${state.key}` } : {};
  return fetch(path, { ...options, headers: { ...headers, ...(options.body ? { "Content-Type": "application/json" } : {}) } });
}

/** What a response says is wrong, in its own words. */
async function failure(response) {
  try {
    const { error } = await response.json();
    return error.message || error;
  } catch {
    return `the server answered with ${response.status}`;
  }
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const count = (number) => number.toLocaleString("en-US");
const rate = (number) => (number >= 100 ? Math.round(number) : Math.round(number * 10) / 10).toLocaleString("en-US");
const time = (ms) => (ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(2)} ms`);
const size = (bytes) => {
  const unit = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(bytes, 1)) / 10)));
  return `${(bytes / 1024 ** unit).toFixed(unit ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
};
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)} %` : "–");

// ---- what is served, and how it does -------------------------------------------------------------------------------

async function refresh() {
  let status;
  try {
    const response = await ask(`/v1/status?since=${state.next}`);
    by("key-form").hidden = response.status !== 401;
    if (!response.ok) return pill(response.status === 401 ? "key needed" : "error", "bad");
    status = await response.json();
  } catch {
    return pill("not reachable", "bad");
  }
  // A new server counts from 0 again.
  if (status.next < state.next) state.seconds = [];
  state.next = status.next;
  state.seconds = state.seconds.concat(status.seconds).slice(-KEPT);
  pill(status.ready ? "ready" : "ending", status.ready ? "good" : "bad");
  by("about").textContent = `version ${status.version}, up ${span(status.uptime_s)}`;
  figures(status);
  state.models = status.models;
  models(status.models);
}

function pill(text, className) {
  by("ready").textContent = text;
  by("ready").className = `pill ${className}`;
}

function span(seconds) {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

function figures(status) {
  const recent = state.seconds.slice(-5);
  const mean = (field) => recent.reduce((sum, second) => sum + second[field], 0) / Math.max(recent.length, 1);
  by("tokens").textContent = rate(mean("tokens"));
  by("requests").textContent = rate(mean("requests"));
  const sum = (field) => status.models.reduce((total, model) => total + (model[field] || 0), 0);
  by("queue").textContent = `${count(sum("running"))} / ${count(sum("waiting"))}`;
  percentiles("", status.latency_ms);
  percentiles("first-", status.first_token_ms);
  chart("tokens-chart", state.seconds.map((second) => second.tokens));
  chart("requests-chart", state.seconds.map((second) => second.requests));
  chart("queue-chart", state.seconds.map((second) => second.running + second.waiting));
}

function percentiles(prefix, times) {
  for (const name of ["p50", "p90", "p99"]) by(prefix + name).textContent = times.count ? time(times[name]) : "–";
  by(`${prefix}count`).textContent = count(times.count);
}

/** Five minutes from left to right; the highest value is at the top. */
function chart(id, values) {
  const canvas = by(id);
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const colours = getComputedStyle(document.documentElement);
  const highest = Math.max(1, ...values);
  const x = (at) => width - ((values.length - at) / KEPT) * width;
  const y = (value) => height - 1 - (value / highest) * (height - 4);
  context.strokeStyle = colours.getPropertyValue("--line");
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  if (!values.length) return;
  by(`${id}-most`).textContent = `at most ${count(Math.max(...values))} in ${span(values.length)}`;
  context.fillStyle = context.strokeStyle = colours.getPropertyValue("--strong");
  context.beginPath();
  context.moveTo(x(0), height);
  values.forEach((value, at) => context.lineTo(x(at), y(value)));
  context.lineTo(width, y(values[values.length - 1]));
  context.lineTo(width, height);
  context.globalAlpha = 0.25;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  values.forEach((value, at) => context.lineTo(x(at), y(value)));
  context.lineTo(width, y(values[values.length - 1]));
  context.lineWidth = 1.5;
  context.stroke();
}

function models(list) {
  by("models").replaceChildren(...list.map(model));
  const names = JSON.stringify(list.map(({ name, kind }) => [name, kind]));
  if (names === state.names) return;
  state.names = names;
  choose("chat", list.filter(({ kind }) => kind === "generate"));
  choose("rank", list.filter(({ kind }) => kind === "rank"));
  rankFields();
}

function model({ name, kind, version, provider, max_context, waiting, running, answered, failed, kv }) {
  const made = element("div", undefined, "model");
  const left = element("div");
  left.append(element("strong", name));
  const words = [kind, `on the ${provider}`];
  if (max_context) words.push(`${count(max_context)} tokens of context`);
  if (version) words.push(`version ${version}`);
  left.append(element("div", words.join(", "), "quiet"));
  const right = element("div");
  if (answered !== undefined) {
    const failures = failed ? `, ${count(failed)} refused or failed` : "";
    right.append(element("div", `${count(running)} run, ${count(waiting)} wait, ${count(answered)} answered${failures}`));
  } else {
    right.append(element("div", "takes tensors, by KServe's protocol", "quiet"));
  }
  if (kv) {
    const used = kv.pages - kv.free;
    const bar = element("div", undefined, "bar");
    for (const [className, pages] of [["shared", kv.shared], ["used", used - kv.shared]]) {
      const part = element("span", undefined, className);
      part.style.width = `${(100 * pages) / Math.max(kv.pages, 1)}%`;
      bar.append(part);
    }
    right.append(bar);
    right.append(element("div", `${count(used)} of ${count(kv.pages)} pages used, ${count(kv.shared)} shared`, "quiet"));
    for (const tier of kv.tiers) {
      const most = tier.bytes ? ` of ${size(tier.bytes)}` : "";
      right.append(element("div", `${tier.name === "host" ? "host memory" : tier.name}: ${size(tier.used)}${most} used`, "quiet"));
    }
    const what = kind === "rank" ? "rows" : "tokens";
    const hits =
      `${percent(kv.cached, kv.cached + kv.computed)} cached: ${count(kv.cached)} ${what}, ` +
      `${count(kv.computed)} computed; ${count(kv.from_store)} came from the store`;
    right.append(element("div", hits, "quiet"));
  }
  made.append(left, right);
  return made;
}

function choose(what, list) {
  by(what).hidden = list.length === 0;
  by(`${what}-model`).replaceChildren(...list.map(({ name }) => new Option(name, name)));
}

// ---- chat ----------------------------------------------------------------------------------------------------------

const talk = { messages: [], session: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), running: null };

function say(text, className) {
  const made = element("p", text, className);
  by("talk").append(made);
  made.scrollIntoView({ block: "nearest" });
  return made;
}

function reset() {
  if (talk.running) talk.running.abort();
  talk.messages = [];
  talk.session = crypto.randomUUID ? crypto.randomUUID() : String(Math.random());
  by("talk").replaceChildren();
  by("chat-note").textContent = "";
}

async function send(event) {
  event.preventDefault();
  if (talk.running) return talk.running.abort();
  const text = by("chat-text").value.trim();
  if (!text) return;
  by("chat-text").value = "";
  say(text, "mine");
  talk.messages.push({ role: "user", content: text });
  const messages = talk.messages;
  const answer = say("…");
  const abort = (talk.running = new AbortController());
  by("send").textContent = "Stop";
  let said = "";
  try {
    said = await stream(messages, abort.signal, (all) => {
      answer.textContent = all;
      by("talk").scrollTop = by("talk").scrollHeight;
    });
    messages.push({ role: "assistant", content: said });
  } catch (error) {
    if (error.name === "AbortError") {
      messages.push({ role: "assistant", content: answer.textContent });
      by("chat-note").textContent = "stopped";
    } else {
      messages.pop();
      answer.textContent = error.message;
      answer.className = "bad";
    }
  }
  talk.running = null;
  by("send").textContent = "Send";
}

/** Streams an answer. `show` gets all text so far. */
async function stream(messages, signal, show) {
  const body = {
    model: by("chat-model").value, messages, stream: true, stream_options: { include_usage: true }, session: talk.session,
    temperature: Number(by("temperature").value), max_tokens: Number(by("max-tokens").value), context_end: "stop",
  };
  const since = performance.now();
  const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await failure(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let [rest, all, first, usage] = ["", "", 0, null];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const text = chunk.choices[0]?.delta?.content || "";
      if (text && !first) first = performance.now();
      all += text;
    }
    show(all);
  }
  if (usage) {
    const seconds = (performance.now() - (first || since)) / 1000;
    const speed = usage.completion_tokens > 1 ? `, ${rate((usage.completion_tokens - 1) / Math.max(seconds, 1e-3))} tokens/s` : "";
    const cached = usage.prompt_tokens_details.cached_tokens;
    by("chat-note").textContent =
      `${count(usage.completion_tokens)} tokens${speed}, the first after ${time((first || since) - since)}; ` +
      `${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`;
  }
  return all;
}

// ---- ranking -------------------------------------------------------------------------------------------------------

function ranker() {
  return state.models.find(({ name }) => name === by("rank-model").value);
}

function rankFields() {
  const features = ranker()?.features;
  if (!features) return;
  const field = (kind, name, value, label) => {
    const made = element("label", label || name);
    const input = element("input");
    input.id = `rank-${kind}-${name}`;
    input.inputMode = "numeric";
    input.value = value;
    made.append(input);
    return made;
  };
  by("rank-keys").replaceChildren(...features.user.map((name) => field("keys", name, "0")));
  const events = features.event.map((name) => field("events", name, "1, 2, 3"));
  if (features.timed) events.push(field("events", "time", "100, 200, 300", "time (s)"));
  by("rank-events").replaceChildren(...events);
  by("rank-candidates").replaceChildren(...features.candidate.map((name) => field("candidates", name, "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")));
}

/** Whole numbers with commas or spaces between them. */
function numbers(id, label) {
  const words = by(id).value.split(/[\s,;]+/).filter(Boolean);
  const wrong = words.find((word) => !/^-?\d+$/.test(word));
  if (wrong) throw new Error(`${label}: ${wrong} is not a whole number`);
  return words.map(Number);
}

async function rank(event) {
  event.preventDefault();
  const { name, features } = ranker();
  by("rank-answer").replaceChildren();
  by("rank-note").className = "quiet";
  try {
    const columns = (kind, names) => Object.fromEntries(names.map((name) => [name, numbers(`rank-${kind}-${name}`, name)]));
    const body = {
      model: name, user: Number(by("rank-user").value), top: 10,
      events: columns("events", features.timed ? [...features.event, "time"] : features.event),
      candidates: columns("candidates", features.candidate),
    };
    if (features.user.length) {
      body.user_keys = Object.fromEntries(features.user.map((name) => [name, numbers(`rank-keys-${name}`, name)[0]]));
    }
    if (features.timed) body.time = Math.max(0, ...body.events.time) + 1;
    const response = await ask("/v1/rank", { method: "POST", body: JSON.stringify(body) });
    if (!response.ok) throw new Error(await failure(response));
    const answer = await response.json();
    by("rank-note").textContent = `${time(answer.ms)}; ${count(answer.cached_rows)} rows cached, ${count(answer.computed_rows)} computed`;
    by("rank-answer").replaceChildren(...Object.entries(answer.top).map(([task, places]) => table(task, places, features.candidate)));
  } catch (error) {
    by("rank-note").textContent = error.message;
    by("rank-note").className = "bad";
  }
}

function table(task, places, names) {
  const made = element("table");
  const head = element("tr");
  head.append(element("th", task), ...names.map((name) => element("th", name)), element("th", "score"), element("th", ""));
  made.append(head);
  const scores = places.map(({ score }) => score ?? 0);
  const [low, high] = [Math.min(0, ...scores), Math.max(...scores)];
  places.forEach(({ keys, score }, at) => {
    const row = element("tr");
    const bar = element("div", undefined, "bar");
    const part = element("span", undefined, "used");
    part.style.width = `${(100 * ((score ?? low) - low)) / (high > low ? high - low : 1)}%`;
    bar.append(part);
    const cell = element("td", undefined, "score");
    cell.append(bar);
    row.append(element("td", String(at + 1)), ...names.map((name) => element("td", String(keys[name]))));
    row.append(element("td", score === null ? "–" : score.toFixed(4)), cell);
    made.append(row);
  });
  const scroll = element("div", undefined, "scroll");
  scroll.append(made);
  return scroll;
}

// ---- events --------------------------------------------------------------------------------------------------------

by("chat-form").addEventListener("submit", send);
by("chat-reset").addEventListener("click", reset);
by("chat-model").addEventListener("change", reset);
by("chat-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !talk.running) {
    event.preventDefault();
    by("chat-form").requestSubmit();
  }
});
by("rank-form").addEventListener("submit", rank);
by("rank-model").addEventListener("change", rankFields);
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = by("key").value.trim();
  sessionStorage.setItem("key", state.key);
  refresh();
});
refresh();
setInterval(() => document.hidden || refresh(), 1000);
