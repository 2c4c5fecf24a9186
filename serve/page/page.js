// Everything that a model wrote goes into the page as text, never as markup.
const $ = (id) => document.getElementById(id);
const make = (tag, cls, text = "") => Object.assign(document.createElement(tag), { className: cls, textContent: text });
let model = "";
let messages = [];
let running = null; // the AbortController of the answers under way

// ---- theme, key, model -------------------------------------------------------------------------------------------

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  sessionStorage.setItem("theme", theme);
}
setTheme(sessionStorage.getItem("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

$("key").value = sessionStorage.getItem("key") ?? "";
$("key").onchange = () => { sessionStorage.setItem("key", $("key").value); connect(); };
const headers = () => ({ "Content-Type": "application/json", ...($("key").value && { Authorization: `Bearer ${$("key").value}` }) });

async function reason(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `the server answered ${response.status}`;
}

async function connect() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(response.status === 401 ? "give the API key under Settings" : await reason(response));
    model = (await response.json()).data[0].id;
    $("model").textContent = model;
  } catch (error) {
    $("model").textContent = error.message;
  }
}

// ---- one answer --------------------------------------------------------------------------------------------------

// Streams an answer into `box`; its text and figures.
async function answer(box, conversation, drafting, signal) {
  const text = box.appendChild(make("div", "text"));
  const note = box.appendChild(make("p", "note", "waiting"));
  const lengths = [];
  const said = { text: "", tokens: 0, steps: 0, committed: 0, drafted: 0, accepted: 0, first: 0, seconds: 0, lengths };
  const body = {
    model, messages: conversation, stream: true, temperature: Number($("temperature").value),
    max_tokens: Number($("tokens").value), stream_options: { include_usage: true, include_dflash: true },
    ...(drafting ? {} : { speculative: { num_speculative_tokens: 0 } }),
  };
  const began = performance.now();
  let first = 0, last = 0;
  const add = (cls, words) => {
    if (!words) return;
    said.text += words;
    if (text.lastChild?.className === cls) text.lastChild.append(words);
    else text.append(make("span", cls, words));
  };
  const take = (event) => {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) said.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (choice?.delta?.content && !choice.dflash) add("", choice.delta.content);
    for (const step of choice?.dflash ?? []) {
      last = performance.now();
      first ||= last;
      add("drafted", step.text[0]);
      add("target", step.text[1]);
      said.tokens += step.tokens;
      if (said.begun) {
        said.steps += 1;
        said.committed += step.tokens;
        said.drafted += step.drafted;
        said.accepted += step.accepted;
        lengths[step.tokens] = (lengths[step.tokens] ?? 0) + 1;
      }
      said.begun = true; // what comes first is of the prefill
    }
    said.first = first ? first - began : 0;
    said.seconds = (last - first) / 1000;
    show(said, note, drafting);
  };
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let left = ""; ;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) take(JSON.parse(line.slice(6)));
    $("chat").scrollTop = $("chat").scrollHeight;
  }
  return said;
}

// ---- figures -----------------------------------------------------------------------------------------------------

const speed = (said) => (said.seconds > 0 ? said.committed / said.seconds : 0);
const shown = (value, digits = 1, unit = "") => (value > 0 ? value.toFixed(digits) + unit : "–");

function show(said, note, drafting) {
  const tau = said.steps ? said.committed / said.steps : 0;
  note.textContent = `${said.tokens} tokens, ${shown(speed(said), 1, " a second")}` + (drafting ? `, ${shown(tau, 2)} a step` : "");
  if (!drafting) {
    $("plain").textContent = shown(speed(said), 1);
    return;
  }
  $("tau").textContent = shown(tau, 2);
  $("speed").textContent = shown(speed(said), 1);
  $("first").textContent = shown(said.first, 0, " ms");
  const most = Math.max(1, ...said.lengths.filter(Boolean));
  const longest = Math.max(4, said.lengths.length - 1);
  while ($("lengths").children.length > longest) $("lengths").lastChild.remove();
  for (let n = 1; n <= longest; n++) {
    const bar = $("lengths").children[n - 1] ?? $("lengths").appendChild(make("div", ""));
    if (!bar.firstChild) bar.append(make("i", ""), make("span", "", String(n)));
    bar.firstChild.style.height = `${(80 * (said.lengths[n] ?? 0)) / most}%`;
    bar.title = `${said.lengths[n] ?? 0} steps of ${n} tokens`;
  }
  const told = said.lengths.map((count, n) => `${count} of ${n}`).filter(Boolean).join(", ");
  $("lengths").setAttribute("aria-label", `Steps by their tokens: ${told || "none yet"}`);
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
  if (!document.hidden) {
    const response = await fetch("metrics", { headers: headers() }).catch(() => null);
    if (response?.ok) {
      const found = {};
      for (const line of (await response.text()).split("\n")) {
        const [, name, value] = /^([\w:]+)(?:\{[^}]*\})? (\S+)$/.exec(line) ?? [];
        if (name in METRICS) found[name] = (found[name] ?? 0) + Number(value);
      }
      const rows = Object.entries(METRICS).filter(([name]) => name in found);
      $("server").replaceChildren(...rows.map(([name, [label, format]]) => {
        const row = make("div", "");
        row.append(make("dt", "", label), make("dd", "", format(found[name])));
        return row;
      }));
    }
  }
  setTimeout(metrics, 3000);
}

// ---- the conversation --------------------------------------------------------------------------------------------

function turn(cls, title) {
  const box = make("div", `turn ${cls}`);
  if (title) box.append(make("h3", "", title));
  return box;
}

async function ask(question) {
  const user = turn("user", "");
  user.textContent = question;
  $("chat").append(user);
  messages.push({ role: "user", content: question });
  const system = $("system").value.trim();
  const conversation = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  running = new AbortController();
  $("send").disabled = true;
  $("stop").hidden = false;
  $("status").textContent = "The model answers.";
  const kinds = $("compare").checked ? [true, false] : [$("drafter").checked];
  const holder = $("chat").appendChild(kinds.length > 1 ? make("div", "turn pair") : make("div", ""));
  try {
    for (const drafting of kinds) { // one behind the other: side by side they would share the device
      const box = turn("", kinds.length > 1 ? (drafting ? "With the drafter" : "Without") : "Answer");
      holder.append(box);
      try {
        const said = await answer(box, conversation, drafting, running.signal);
        if (drafting === kinds[0]) messages.push({ role: "assistant", content: said.text });
      } catch (error) {
        const stopped = error.name === "AbortError";
        box.append(make("p", stopped ? "note" : "error", stopped ? "stopped" : error.message));
        if (drafting === kinds[0]) messages.pop();
        break;
      }
    }
  } finally {
    running = null;
    $("send").disabled = false;
    $("stop").hidden = true;
    $("status").textContent = `${$("speed").textContent} tokens a second, ${$("tau").textContent} a step.`;
    $("chat").scrollTop = $("chat").scrollHeight;
    $("question").focus();
  }
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
$("compare").onchange = () => { $("drafter").disabled = $("compare").checked; };
$("stop").onclick = () => running?.abort();
$("new").onclick = () => {
  running?.abort();
  messages = [];
  $("chat").replaceChildren(make("p", "", "Ask something: the colours show which tokens the drafter proposed."));
  $("question").focus();
};

$("new").click();
connect();
metrics();
