// What the page computes: no element of the page is used here, so that Node can test it.

export const SHORTEST_S = 0.5; // no speed is shown before this much of an answer

// Kinds of text: "accepted" drafts, the target's own token after a "wrong" draft, "own" where nothing was drafted.
export function newAnswer(drafting) {
  return {
    drafting, segments: [], content: "", reasoning: "", finish: null, note: "", error: "", seconds: 0, first: 0,
    tokens: 0, timed: 0, steps: 0, committed: 0, undrafted: 0, lengths: [],
  };
}

function add(answer, kind, text) {
  if (!text) return;
  const last = answer.segments.at(-1);
  if (last?.[0] === kind) last[1] += text;
  else answer.segments.push([kind, text]);
}

// Adds one event of the stream to an answer. `now` is the time in seconds since the request was sent.
export function take(answer, event, now) {
  if (event.error) throw new Error(event.error.message);
  if (event.usage) answer.tokens = event.usage.completion_tokens;
  const choice = event.choices?.[0];
  if (!choice) return;
  answer.finish = choice.finish_reason ?? answer.finish;
  answer.content += choice.delta?.content ?? "";
  answer.reasoning += choice.delta?.reasoning_content ?? "";
  for (const step of choice.dflash ?? []) {
    add(answer, "accepted", step.text[0]);
    add(answer, step.drafted > step.accepted ? "wrong" : "own", step.text[1]);
    answer.tokens += step.tokens;
    if (answer.first) { // the first token comes from the prompt, not from a verification step
      answer.steps += 1;
      answer.committed += step.tokens;
      answer.undrafted += step.drafted === 0;
      answer.lengths[step.tokens] = (answer.lengths[step.tokens] ?? 0) + 1;
    } else {
      answer.first = now;
    }
    answer.seconds = now - answer.first;
  }
}

export const speed = (answer) => (answer?.seconds >= SHORTEST_S ? answer.committed / answer.seconds : 0);
export const perStep = (answer) => (answer?.steps ? answer.committed / answer.steps : 0);
export const rawText = (answer) => answer.segments.map(([, text]) => text).join("");

// The text as runs of one kind, all inside or all outside a code block: [kind, text, in code].
export function runs(answer) {
  const found = [];
  let offset = 0;
  const text = rawText(answer), edges = [...text.matchAll(/^ {0,3}(```|~~~).*$/gm)].map((at, i) => at.index + (i % 2 ? at[0].length : 0));
  for (const [kind, words] of answer.segments) {
    const inside = edges.filter((edge) => edge > offset && edge < offset + words.length);
    const cuts = [offset, ...inside, offset + words.length];
    for (let i = 0; i + 1 < cuts.length; i++) {
      const code = edges.filter((edge) => edge <= cuts[i]).length % 2 === 1;
      found.push([kind, text.slice(cuts[i], cuts[i + 1]), code]);
    }
    offset += words.length;
  }
  return found;
}

// How many times faster the first answer of a comparison is than the second; 0 if that is not known.
export function ratio(answers) {
  const withDrafter = answers.find((one) => one.drafting), without = answers.find((one) => !one.drafting);
  if (answers.some((one) => one.error || one.note)) return 0;
  return speed(withDrafter) && speed(without) ? speed(withDrafter) / speed(without) : 0;
}

// The messages that continue a conversation. A turn without a word of an answer is not part of it.
export function messages(turns, system, question) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    const content = turn.answers[0]?.content || rawText(turn.answers[0]); // stopped while it was reasoning
    if (content) found.push({ role: "user", content: turn.question }, { role: "assistant", content });
  }
  return [...found, { role: "user", content: question }];
}

// Splits what arrived of an event stream into whole events; returns the unfinished rest too.
export function events(text) {
  const lines = text.split("\n");
  const rest = lines.pop();
  return [lines.filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6))), rest];
}

// Sums of the named metrics in a Prometheus text.
export function metricSums(text, names) {
  const found = {};
  for (const line of text.split("\n")) {
    const [, name, value] = /^([\w:]+)(?:\{[^}]*\})? (\S+)$/.exec(line) ?? [];
    if (names.includes(name)) found[name] = (found[name] ?? 0) + Number(value);
  }
  return found;
}

// One line of figures below an answer.
export function summary(answer, hasDrafter) {
  const parts = [`${answer.tokens} token${answer.tokens === 1 ? "" : "s"}`];
  if (speed(answer)) parts.push(`${speed(answer).toFixed(1)} a second`);
  if (hasDrafter && answer.drafting && answer.steps) parts.push(`${perStep(answer).toFixed(2)} a step`);
  if (hasDrafter && !answer.drafting) parts.push("drafter off");
  return parts.join(" · ");
}
