// Measures the server from this page, as `ingot bench serve` does: so many streams at once, each prompt its own.

const WORDS = `time year people way day man thing woman life child world school state family student group country problem hand part
  place case week company system program question work number night point home water room mother area money story fact month lot
  right study book eye job word business issue side kind head house service friend father power hour game line`.split(/\s+/);
const REQUESTS_PER_STREAM = 4;
const PROBE_WORDS = [16, 64];

// One answer, timed from before it is asked for. `onText` is called with all of it so far.
export async function timed(api, body, signal, onText = () => {}) {
  const started = performance.now();
  const arrivals = [];
  let [text, thinking, usage] = ['', '', null];
  for await (const chunk of api.chat(body, signal)) {
    const delta = chunk.choices?.[0]?.delta ?? {};
    usage = chunk.usage ?? usage;
    if (!delta.content && !delta.reasoning_content) continue;
    arrivals.push(performance.now());
    text += delta.content ?? '';
    thinking += delta.reasoning_content ?? '';
    onText({ text, thinking });
  }
  const { prompt_tokens: prompt = 0, completion_tokens: output = arrivals.length } = usage ?? {};
  return { started, ended: performance.now(), arrivals, prompt, output, text, thinking };
}

// The figures of one level, in the units that they are shown in.
export function summary(streams, samples, failed) {
  const good = samples.filter(({ arrivals }) => arrivals.length > 0);
  const seconds = (Math.max(...samples.map(({ ended }) => ended)) - Math.min(...samples.map(({ started }) => started))) / 1000;
  const mean = (values) => values.reduce((total, value) => total + value, 0) / Math.max(1, values.length);
  return {
    streams,
    done: good.length,
    failed: failed + samples.length - good.length,
    prompt: mean(good.map(({ prompt }) => prompt)),
    output: mean(good.map(({ output }) => output)),
    perSecond: good.length > 0 ? good.reduce((total, { output }) => total + output, 0) / seconds : 0,
    each: mean(good.map(({ started, ended, output }) => (1000 * output) / (ended - started))),
    ttft: spread(good.map(({ started, arrivals }) => arrivals[0] - started)),
    // A browser hands several tokens over at once, so this is the mean of each answer, not each gap.
    itl: spread(good.filter(({ output }) => output > 1).map(({ arrivals, output }) => (arrivals.at(-1) - arrivals[0]) / (output - 1))),
  };
}

export function spread(values) {
  const sorted = values.toSorted((one, other) => one - other);
  return sorted.length > 0 ? [0.5, 0.9, 0.99].map((share) => quantile(sorted, share)) : null;
}

// Between the neighbours of where it lies.
function quantile(sorted, share) {
  const rank = share * (sorted.length - 1);
  const [low, high] = [Math.floor(rank), Math.ceil(rank)];
  return sorted[low] + (sorted[high] - sorted[low]) * (rank - low);
}

// Yields the figures of each level of `plan`: {model, prompt, output, levels}.
export async function* measured(api, plan, signal) {
  const words = await wordsFor(api, plan, signal);
  for (const streams of plan.levels) {
    await timed(api, bodyOf(plan, words), signal); // warms up
    yield await level(api, plan, words, streams, signal);
  }
}

async function level(api, plan, words, streams, signal) {
  const samples = [];
  let [left, failed, error] = [REQUESTS_PER_STREAM * streams, 0, null];
  const stream = async () => {
    while (left > 0 && !signal.aborted) {
      left -= 1;
      try {
        samples.push(await timed(api, bodyOf(plan, words), signal));
      } catch (reason) {
        [failed, error] = [failed + 1, reason];
      }
    }
  };
  await Promise.all(Array.from({ length: streams }, stream));
  if (signal.aborted || samples.length === 0) throw error;
  return summary(streams, samples, failed);
}

// How many words make a prompt of so many tokens, by the server's own count.
async function wordsFor(api, plan, signal) {
  const counts = [];
  for (const words of PROBE_WORDS) counts.push((await timed(api, { ...bodyOf(plan, words), max_tokens: 1 }, signal)).prompt);
  const perWord = Math.max(1, counts[1] - counts[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]);
  return Math.max(1, Math.round((plan.prompt - counts[1]) / perWord + PROBE_WORDS[1]));
}

function bodyOf({ model, output }, words) {
  const text = Array.from({ length: words }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(' ');
  return { model, messages: [{ role: 'user', content: text }], temperature: 0, max_tokens: output, ignore_eos: true };
}
