// Everything that a model wrote goes into the page as text, or as Markdown that DOMPurify has cleaned.
import { events, messages, metricSums, newAnswer, perStep, ratio, rawText, runs, speed, summary, take } from "./chat.js";
import { rendered } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const make = (tag, cls, text = "") => Object.assign(document.createElement(tag), { className: cls, textContent: text });
const root = document.documentElement;
let model = "";
let hasDrafter = true;
let turns = [];
let editing = null; // the number of the turn that the question in the box replaces
let chats = 0; // how many were begun with "New chat"
let running = null; // the AbortController of the answers being written

// ---- settings that a reload keeps --------------------------------------------------------------------------------

function store(name, value) {
  try { sessionStorage.setItem(name, value); } catch { /* full or forbidden: the page works without */ }
}

function setTheme(theme) {
  root.dataset.theme = theme;
  const label = theme === "dark" ? "Light colours" : "Dark colours";
  $("theme").ariaLabel = $("theme").title = label;
  store("theme", theme);
}
setTheme(sessionStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => setTheme(root.dataset.theme === "dark" ? "light" : "dark");

for (const input of ["temperature", "tokens", "system", "key", "drafter", "compare"].map($)) {
  const field = input.type === "checkbox" ? "checked" : "value";
  const kept = sessionStorage.getItem(`set-${input.id}`);
  if (kept !== null) input[field] = field === "checked" ? kept === "true" : kept;
  input.addEventListener("change", () => store(`set-${input.id}`, input[field]));
}
$("key").addEventListener("change", () => connect());
$("compare").addEventListener("change", showControls);
const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });
const views = document.querySelectorAll("[name=view]");
const view = () => (hasDrafter ? document.querySelector("[name=view]:checked").value : "text");
for (const input of views) {
  input.checked = input.value === (sessionStorage.getItem("view") ?? "tokens");
  input.onchange = () => { store("view", view()); drawAll(); };
}

function showControls() {
  root.dataset.drafter = hasDrafter ? "yes" : "no";
  $("drafter").disabled = $("compare").checked;
}

// ---- the server --------------------------------------------------------------------------------------------------

const EARLY = "The answer ended early.";
class Unreachable extends Error {}

// Like fetch; says whether the server could be reached, in the page and in the error.
async function request(path, options = {}) {
  try {
    const response = await fetch(path, { headers: headers(), ...options });
    reached(true);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reached(false);
    throw new Unreachable("The server cannot be reached.");
  }
}

async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

function reached(yes) {
  const back = yes && !$("gone").hidden;
  $("gone").hidden = yes;
  root.dataset.server = yes ? "here" : "gone";
  if (back) connect();
}

async function connect() {
  try {
    const response = await request("v1/models");
    if (!response.ok) throw new Error(response.status === 401 ? "give the API key under Settings" : await reason(response));
    const card = (await response.json()).data[0];
    model = card.id;
    $("model").textContent = $("model").title = model;
    const most = card.max_model_len ?? Infinity;
    $("tokens").value = Math.min($("tokens").value, Math.ceil(most / 2)); // the prompt needs room
    const had = hasDrafter;
    hasDrafter = card.num_speculative_tokens !== 0;
    showControls();
    if (had !== hasDrafter) drawAll();
  } catch (error) {
    if (!(error instanceof Unreachable)) $("model").textContent = error.message;
  }
}

const METRICS = {
  "vllm:num_requests_running": ["Running", (v) => v.toFixed(0)],
  "vllm:num_requests_waiting": ["Waiting", (v) => v.toFixed(0)],
  "vllm:kv_cache_usage_perc": ["Cache in use", (v) => `${(100 * v).toFixed(0)} %`],
  "vllm:generation_tokens_total": ["Tokens so far", (v) => v.toFixed(0)],
  "vllm:spec_decode_num_draft_tokens_total": ["Drafted", (v) => v.toFixed(0)],
  "vllm:spec_decode_num_accepted_tokens_total": ["Accepted", (v) => v.toFixed(0)],
};

async function metrics() {
  if (document.hidden) return;
  const response = await request("metrics").catch(() => null);
  if (!response?.ok) return;
  const found = metricSums(await response.text(), Object.keys(METRICS));
  const rows = Object.entries(METRICS).filter(([name]) => name in found && (hasDrafter || !name.includes("spec_decode")));
  $("server").replaceChildren(...rows.map(([name, [label, format]]) => {
    const row = make("div", "");
    row.append(make("dt", "", label), make("dd", "", format(found[name])));
    return row;
  }));
}
setInterval(metrics, 3000);

async function learning() {
  if (document.hidden || !hasDrafter) return;
  const response = await request("v1/drafter").catch(() => null);
  const state = response?.ok ? await response.json() : {};
  $("learning").hidden = !state.training;
  $("learning").textContent = state.training?.error ?? state.summary ?? "";
}
setInterval(learning, 3000);

// ---- copying ------------------------------------------------------------------------------------------------------

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // only allowed over HTTPS and on this machine
    const box = document.body.appendChild(Object.assign(make("textarea", "hidden"), { value: text }));
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

function button(label, action) {
  const found = make("button", "small", label);
  found.type = "button";
  found.onclick = action;
  return found;
}

function copyButton(label, text) {
  const found = button(label, async () => {
    await copy(text());
    found.textContent = "Copied";
    $("status").textContent = "Copied.";
    setTimeout(() => { found.textContent = label; }, 1500);
  });
  return found;
}

// ---- drawing -----------------------------------------------------------------------------------------------------

const chat = $("chat");
const atEnd = () => chat.scrollHeight - chat.scrollTop - chat.clientHeight < 48;

let following = true; // until the reader scrolls up
function followEnd() {
  if (following) chat.scrollTop = chat.scrollHeight;
  $("down").hidden = atEnd();
}
chat.onscroll = () => {
  following = atEnd();
  $("down").hidden = following;
};
new ResizeObserver(followEnd).observe(chat);
$("down").onclick = () => { following = true; followEnd(); };

function drawAnswer(box, answer, last) {
  const parts = [];
  if (answer.title) parts.push(make("h3", "", answer.title));
  if (view() === "tokens") {
    const text = make("div", "text raw");
    text.append(...runs(answer).map(([kind, words, code]) => make(code ? "code" : "span", answer.drafting ? kind : "", words)));
    parts.push(text);
  } else {
    if (answer.reasoning) {
      const thought = make("details", "thought");
      thought.open = box.querySelector(".thought")?.open ?? false;
      thought.append(make("summary", "", "Reasoning"), make("div", "raw", answer.reasoning));
      parts.push(thought);
    }
    const text = make("div", "text");
    text.append(rendered(answer.content));
    for (const frame of text.querySelectorAll(".code")) {
      frame.prepend(copyButton("Copy code", () => frame.querySelector("pre").textContent));
    }
    parts.push(text);
  }
  const foot = make("div", "foot");
  foot.append(make("span", "note", answer.tokens ? summary(answer, hasDrafter) : answer.open ? "waiting" : ""));
  if (answer.finish === "length") foot.append(make("span", "cut", "cut at the length limit"));
  if (answer.note) foot.append(make("span", "note", answer.note));
  if (!answer.open) {
    foot.append(copyButton("Copy", () => answer.content || rawText(answer)));
    if (last) foot.append(button("Regenerate", () => { if (!running) { const { question } = turns.pop(); ask(question); } }));
  }
  parts.push(foot);
  if (answer.error) parts.push(make("p", "error", answer.error));
  box.replaceChildren(...parts);
}

function drawTurn(turn, number) {
  const user = make("div", "turn user");
  user.append(make("div", "said", turn.question));
  if (!running) user.append(button("Edit", () => edit(number)));
  const holder = make("div", turn.answers.length > 1 ? "turn pair" : "turn");
  turn.answers.forEach((answer, i) => {
    const box = holder.appendChild(make("div", "answer"));
    drawAnswer(box, answer, number === turns.length - 1 && i === 0);
  });
  return [user, holder];
}

const EXAMPLES = [
  "Write a Python function that says whether a number is prime, with two tests.",
  "Explain in three short paragraphs why the sky is blue.",
  "List the planets in a table: name, diameter in km, number of moons.",
];

function emptyState() {
  const box = make("div", "empty");
  box.append(make("h3", "", "Ask the model something"));
  box.append(make("p", "with-drafter", "Colours show which tokens the drafter proposed and the target accepted."));
  const list = box.appendChild(make("div", "examples"));
  for (const text of EXAMPLES) {
    const one = button(text, () => ask(text));
    one.className = "example";
    list.append(one);
  }
  const compare = button("Try Compare: the first question with and without the drafter", () => {
    $("compare").checked = true;
    $("compare").dispatchEvent(new Event("change"));
    ask(EXAMPLES[0]);
  });
  compare.className = "example with-drafter";
  list.append(compare);
  return box;
}

function drawAll() {
  const { scrollTop } = chat;
  chat.replaceChildren(...(turns.length ? turns.flatMap(drawTurn) : [emptyState()]));
  chat.scrollTop = scrollTop;
  followEnd();
  drawFigures(turns.at(-1)?.answers ?? []);
}

const shown = (value, digits = 1, unit = "", none = "–") => (value > 0 ? value.toFixed(digits) + unit : none);

function ratioNote(answers, times) {
  if (times) {
    const same = answers[0].content === answers[1].content;
    return `${times < 0.995 ? "the speed without" : "faster than without"} the drafter${same ? ", the same answer" : ""}`;
  }
  if (answers.length < 2) return "Compare shows how many times faster the drafter makes an answer.";
  return answers.some((one) => one.open) ? "comparing" : "These answers are too short to compare.";
}

function drawFigures(answers) {
  const main = answers.find((one) => one.drafting) ?? answers[0], plain = answers.find((one) => !one.drafting);
  const times = ratio(answers);
  $("ratio").textContent = shown(times, times < 0.995 ? 2 : 1, "×", "");
  $("note").textContent = ratioNote(answers, times);
  $("tau").textContent = shown(main?.drafting ? perStep(main) : 0, 2);
  $("speed").textContent = shown(hasDrafter && !main?.drafting ? 0 : speed(main), 1);
  $("plain").textContent = shown(speed(plain), 1);
  $("first").textContent = shown(1000 * (main?.first ?? 0), 0, " ms");
  $("undrafted").hidden = !(main?.drafting && main.undrafted);
  const lengths = main?.drafting ? main.lengths : [];
  const most = Math.max(1, ...lengths.filter(Boolean));
  const longest = Math.max(4, lengths.length - 1);
  while ($("lengths").children.length > longest) $("lengths").lastChild.remove();
  for (let n = 1; n <= longest; n++) {
    const bar = $("lengths").children[n - 1] ?? $("lengths").appendChild(make("div", ""));
    if (!bar.firstChild) bar.append(make("i", ""), make("span", "", String(n)));
    bar.firstChild.style.height = `${(80 * (lengths[n] ?? 0)) / most}%`;
    bar.title = `${lengths[n] ?? 0} steps of ${n} tokens`;
  }
  const said = lengths.map((count, n) => count && `${count} of ${n}`).filter(Boolean).join(", ");
  $("lengths").ariaLabel = `Steps by their tokens: ${said || "none yet"}`;
}

// ---- the conversation --------------------------------------------------------------------------------------------

const save = () => store("turns", JSON.stringify(turns.map((turn) => ({
  ...turn, answers: turn.answers.map((one) => (one.open ? { ...one, open: false, note: "stopped" } : one)),
}))));

async function stream(answer, conversation, signal, changed) {
  const body = {
    model, messages: conversation, stream: true, temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value), stream_options: { include_usage: true, include_dflash: true },
    ...(answer.drafting || !hasDrafter ? {} : { speculative: { num_speculative_tokens: 0 } }),
  };
  const began = performance.now();
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(EARLY);
    });
    if (done) break;
    let found;
    [found, rest] = events(rest + value);
    for (const event of found) take(answer, event, (performance.now() - began) / 1000);
    changed();
  }
  if (!answer.finish) throw new Error(EARLY);
}

async function ask(question) {
  if (running) return;
  if (editing !== null) turns.length = editing;
  editing = null;
  $("editing").hidden = true;
  if (turns.at(-1)?.question === question && turns.at(-1).answers.some((one) => one.error)) turns.pop(); // asked again after an error
  const conversation = messages(turns, $("system").value.trim(), question);
  const comparing = hasDrafter && $("compare").checked;
  const kinds = comparing ? [true, false] : [hasDrafter && $("drafter").checked];
  const answers = kinds.map((drafting) => ({
    ...newAnswer(drafting), open: true, title: comparing ? (drafting ? "With the drafter" : "Without") : "",
  }));
  const begun = chats;
  const turn = { question, answers };
  turns.push(turn);
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  $("status").textContent = "The model answers.";
  following = true;
  drawAll();
  const boxes = chat.lastChild.querySelectorAll(".answer");
  for (const [i, answer] of answers.entries()) { // one after the other: at the same time they would share the device
    let drawn = 0;
    const draw = () => {
      drawn = 0;
      drawAnswer(boxes[i], answer, false);
      followEnd();
      drawFigures(answers);
    };
    try {
      await stream(answer, conversation, running.signal, () => { drawn ||= requestAnimationFrame(draw); });
    } catch (error) {
      if (error.name === "AbortError") {
        answer.note = "stopped";
      } else {
        answer.error = error.message;
      }
    }
    cancelAnimationFrame(drawn);
    answer.open = false;
    if (answer.note || answer.error) break;
    draw();
  }
  running = null;
  const failed = answers[0].error;
  const kept = answers.filter((one) => !one.open && (one.tokens || one.error));
  if (kept.length) turn.answers = kept;
  else turns = turns.filter((one) => one !== turn); // stopped before the first token
  if (begun === chats && (failed || !kept.length) && !$("question").value) $("question").value = question;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("status").textContent = failed || `The answer has ended: ${kept.map((one) => summary(one, hasDrafter)).join("; ")}.`;
  drawAll();
  save();
  $("question").focus();
}

function edit(number) {
  editing = number;
  $("question").value = turns[number].question;
  $("editing").hidden = false;
  $("question").focus();
}

function stopEditing() {
  editing = null;
  $("editing").hidden = true;
  $("question").value = "";
  $("question").focus();
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  ask(question);
};
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
$("stop").onclick = () => running?.abort();
$("cancel").onclick = stopEditing;
$("figures").onclick = () => showSide($("figures").ariaExpanded !== "true");
function showSide(open) {
  $("figures").ariaExpanded = String(open);
  $("side").classList.toggle("open", open);
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (running) running.abort();
  else if (editing !== null) stopEditing();
  else showSide(false);
});
$("new").onclick = () => {
  running?.abort();
  turns = [];
  chats += 1;
  stopEditing();
  drawAll();
  save();
};
addEventListener("pagehide", save);

try {
  turns = JSON.parse(sessionStorage.getItem("turns") ?? "[]");
} catch { /* unreadable: start afresh */ }
showControls();
drawAll();
if (matchMedia("(pointer: fine)").matches) $("question").focus();
connect();
metrics();
