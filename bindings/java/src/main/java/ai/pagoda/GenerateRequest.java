package ai.pagoda;

import java.nio.ByteOrder;
import java.nio.IntBuffer;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;

/**
 * A request for text. It has one of {@link #prompt}, {@link #tokens(int...) tokens} and
 * {@link #messages(Message...) messages}. A number that is not set is as {@code generation} in the model's pagoda.json says,
 * or, if that does not say either, the default that its method names. A request may be sent again, and be changed in
 * between; it is for one thread at a time.
 */
public final class GenerateRequest {
    private long maxNewTokens = Native.UNSET;
    private long minNewTokens = Native.UNSET;
    private long doSample = Native.UNSET;
    private long temperature = Native.UNSET;
    private long topK = Native.UNSET;
    private long topP = Native.UNSET;
    private long minP = Native.UNSET;
    private long repetitionPenalty = Native.UNSET;
    private long presencePenalty = Native.UNSET;
    private long frequencyPenalty = Native.UNSET;
    private long noRepeatNgramSize = Native.UNSET;
    private long forcedEos = Native.UNSET;
    private long ignoreEos = Native.UNSET;
    private long includeStop = Native.UNSET;
    private long skipSpecial = Native.UNSET;
    private long logprobs = Native.UNSET;
    private long promptLogprobs = Native.UNSET;
    private long n = Native.UNSET;
    private long echo = Native.UNSET;
    private long priority = Native.UNSET;
    private long contextEnd = Native.UNSET;
    private long addGenerationPrompt = Native.UNSET;
    private long maxDraft = Native.UNSET;
    private boolean hasSeed;
    private long seed;
    private long timeoutUs;
    private String prompt;
    private IntBuffer tokens;
    private String messages;
    private String tools;
    private String variables;
    private List<String> stop = List.of();
    private int[] stopTokens = {};
    private final Map<Integer, Float> logitBias = new LinkedHashMap<>();
    private String session;
    private Cancel cancel;
    private KvPolicy kvPolicy;
    private String grammar;
    private BeamOptions beams;

    /** A request with the model's defaults. Its prompt must still be set. */
    public GenerateRequest() {}

    /**
     * What the text follows, as a text. The special tokens that the model's tokenizer puts before a text are added.
     *
     * @param prompt the text; {@code null} = none
     * @return this request
     */
    public GenerateRequest prompt(String prompt) {
        this.prompt = prompt;
        return this;
    }

    /**
     * What the text follows, as tokens.
     *
     * @param tokens the tokens; {@code null} = none
     * @return this request
     */
    public GenerateRequest tokens(int... tokens) {
        this.tokens = tokens == null ? null : IntBuffer.wrap(tokens);
        return this;
    }

    /**
     * What the text follows, as tokens from the position of a buffer to its limit. A direct buffer in the machine's byte
     * order is not copied.
     *
     * @param tokens the tokens; {@code null} = none
     * @return this request
     */
    public GenerateRequest tokens(IntBuffer tokens) {
        this.tokens = tokens == null ? null : tokens.slice();
        return this;
    }

    /**
     * What the text follows, as the messages of a chat.
     *
     * @param messages the messages
     * @return this request
     */
    public GenerateRequest messages(Message... messages) {
        return messages(List.of(messages));
    }

    /**
     * What the text follows, as the messages of a chat.
     *
     * @param messages the messages
     * @return this request
     */
    public GenerateRequest messages(List<Message> messages) {
        return messages(Message.json(messages));
    }

    /**
     * What the text follows, as the messages of a chat in JSON: an array of objects with {@code role} and {@code content},
     * and whatever else the model's chat template takes.
     *
     * @param messages JSON; {@code null} = none
     * @return this request
     */
    public GenerateRequest messages(String messages) {
        this.messages = messages;
        return this;
    }

    /**
     * With messages: the tools that the model may call.
     *
     * @param tools JSON; {@code null} = none
     * @return this request
     */
    public GenerateRequest tools(String tools) {
        this.tools = tools;
        return this;
    }

    /**
     * With messages: more variables of the chat template.
     *
     * @param variables a JSON object; {@code null} = none
     * @return this request
     */
    public GenerateRequest variables(String variables) {
        this.variables = variables;
        return this;
    }

    /**
     * The maximum number of tokens of an answer; default: as many as the context has room for.
     *
     * @param maxNewTokens how many
     * @return this request
     */
    public GenerateRequest maxNewTokens(int maxNewTokens) {
        this.maxNewTokens = Native.unsigned(maxNewTokens, "maxNewTokens");
        return this;
    }

    /**
     * The number of tokens before which no end-of-sequence token is taken; default 0.
     *
     * @param minNewTokens how many
     * @return this request
     */
    public GenerateRequest minNewTokens(int minNewTokens) {
        this.minNewTokens = Native.unsigned(minNewTokens, "minNewTokens");
        return this;
    }

    /**
     * Whether tokens are drawn; else the most likely one is taken. Default: drawn if {@link #temperature} is given and
     * not 0.
     *
     * @param doSample whether they are
     * @return this request
     */
    public GenerateRequest doSample(boolean doSample) {
        this.doSample = doSample ? 1 : 0;
        return this;
    }

    /**
     * What logits are divided by; 0: the most likely token is taken. Default 1.
     *
     * @param temperature by what
     * @return this request
     */
    public GenerateRequest temperature(float temperature) {
        this.temperature = Packed.unsigned(temperature, "temperature");
        return this;
    }

    /**
     * The number of most likely tokens that are drawn from; 0: all. Default: all.
     *
     * @param topK how many
     * @return this request
     */
    public GenerateRequest topK(int topK) {
        this.topK = Native.unsigned(topK, "topK");
        return this;
    }

    /**
     * The probability that the tokens drawn from have together, 0 to 1; default 1.
     *
     * @param topP the probability
     * @return this request
     */
    public GenerateRequest topP(float topP) {
        this.topP = Packed.unsigned(topP, "topP");
        return this;
    }

    /**
     * The least probability of a token that is drawn, relative to the most likely one, 0 to 1; default 0.
     *
     * @param minP the part
     * @return this request
     */
    public GenerateRequest minP(float minP) {
        this.minP = Packed.unsigned(minP, "minP");
        return this;
    }

    /**
     * The penalty of tokens in the prompt and in the answer so far, above 0; default 1, which is none.
     *
     * @param repetitionPenalty the penalty
     * @return this request
     */
    public GenerateRequest repetitionPenalty(float repetitionPenalty) {
        this.repetitionPenalty = Packed.unsigned(repetitionPenalty, "repetitionPenalty");
        return this;
    }

    /**
     * Subtracted from the logits of tokens that the answer has, -2 to 2; default 0.
     *
     * @param presencePenalty how much
     * @return this request
     */
    public GenerateRequest presencePenalty(float presencePenalty) {
        this.presencePenalty = Packed.bits(presencePenalty);
        return this;
    }

    /**
     * Subtracted from the logits of tokens as often as the answer has them, -2 to 2; default 0.
     *
     * @param frequencyPenalty how much
     * @return this request
     */
    public GenerateRequest frequencyPenalty(float frequencyPenalty) {
        this.frequencyPenalty = Packed.bits(frequencyPenalty);
        return this;
    }

    /**
     * No sequence of so many tokens occurs twice; 0: any may. Default 0.
     *
     * @param noRepeatNgramSize how many
     * @return this request
     */
    public GenerateRequest noRepeatNgramSize(int noRepeatNgramSize) {
        this.noRepeatNgramSize = Native.unsigned(noRepeatNgramSize, "noRepeatNgramSize");
        return this;
    }

    /**
     * The token that the last of {@link #maxNewTokens} is forced to be; default: none is forced.
     *
     * @param forcedEos the token
     * @return this request
     */
    public GenerateRequest forcedEos(int forcedEos) {
        this.forcedEos = Native.unsigned(forcedEos, "forcedEos");
        return this;
    }

    /**
     * Whether end-of-sequence tokens do not end the answer; default: they do.
     *
     * @param ignoreEos whether they do not
     * @return this request
     */
    public GenerateRequest ignoreEos(boolean ignoreEos) {
        this.ignoreEos = ignoreEos ? 1 : 0;
        return this;
    }

    /**
     * Whether the answer's text has the stop text that ended it; default: no.
     *
     * @param includeStop whether it has
     * @return this request
     */
    public GenerateRequest includeStop(boolean includeStop) {
        this.includeStop = includeStop ? 1 : 0;
        return this;
    }

    /**
     * Whether the answer's text leaves special tokens out; default: it does.
     *
     * @param skipSpecial whether it does
     * @return this request
     */
    public GenerateRequest skipSpecial(boolean skipSpecial) {
        this.skipSpecial = skipSpecial ? 1 : 0;
        return this;
    }

    /**
     * Asks for the log probabilities of the answer's tokens, and of so many most likely tokens in their places;
     * default: for none.
     *
     * @param logprobs how many most likely tokens
     * @return this request
     */
    public GenerateRequest logprobs(int logprobs) {
        this.logprobs = Native.unsigned(logprobs, "logprobs");
        return this;
    }

    /**
     * Asks for the same of the prompt's tokens; default: for none. The prompt is then computed as a whole.
     *
     * @param promptLogprobs how many most likely tokens
     * @return this request
     */
    public GenerateRequest promptLogprobs(int promptLogprobs) {
        this.promptLogprobs = Native.unsigned(promptLogprobs, "promptLogprobs");
        return this;
    }

    /**
     * The number of answers; default 1.
     *
     * @param n how many
     * @return this request
     */
    public GenerateRequest n(int n) {
        this.n = n;
        return this;
    }

    /**
     * Whether the text of an answer begins with the prompt; default: no.
     *
     * @param echo whether it does
     * @return this request
     */
    public GenerateRequest echo(boolean echo) {
        this.echo = echo ? 1 : 0;
        return this;
    }

    /**
     * Requests of higher priority run first; default 0. Requests of one priority run in order of arrival.
     *
     * @param priority the priority
     * @return this request
     */
    public GenerateRequest priority(int priority) {
        this.priority = priority;
        return this;
    }

    /**
     * What happens if prompt and answer do not fit into the model's context; default {@link ContextEnd#REFUSE}.
     *
     * @param contextEnd what
     * @return this request
     */
    public GenerateRequest contextEnd(ContextEnd contextEnd) {
        this.contextEnd = Objects.requireNonNull(contextEnd, "contextEnd").number;
        return this;
    }

    /**
     * With messages: whether the prompt ends before an answer of the model, rather than after the last message;
     * default: it does.
     *
     * @param addGenerationPrompt whether it does
     * @return this request
     */
    public GenerateRequest addGenerationPrompt(boolean addGenerationPrompt) {
        this.addGenerationPrompt = addGenerationPrompt ? 1 : 0;
        return this;
    }

    /**
     * The seed of the draws: the same request with the same seed gets the same tokens. Default: another one for each request.
     *
     * @param seed the seed
     * @return this request
     */
    public GenerateRequest seed(long seed) {
        this.hasSeed = true;
        this.seed = seed;
        return this;
    }

    /**
     * The time limit; default: none. The answer then has what was generated until then, and ends with
     * {@link FinishReason#TIMEOUT}, which is no error.
     *
     * @param timeout how long, in whole microseconds; zero: no limit
     * @return this request
     */
    public GenerateRequest timeout(Duration timeout) {
        long us = Native.micros(timeout, "timeout");
        this.timeoutUs = us == 0 && !timeout.isZero() ? 1 : us;
        return this;
    }

    /**
     * Texts that end the answer. The answer does not have them, unless {@link #includeStop} is set.
     *
     * @param stop the texts
     * @return this request
     */
    public GenerateRequest stop(String... stop) {
        this.stop = List.of(stop);
        return this;
    }

    /**
     * Tokens that end the answer, beside the model's end-of-sequence tokens.
     *
     * @param stopTokens the tokens
     * @return this request
     */
    public GenerateRequest stopTokens(int... stopTokens) {
        this.stopTokens = stopTokens.clone();
        return this;
    }

    /**
     * What is added to the logit of a token; -1e30 bans it. It may be said of any number of tokens.
     *
     * @param token the token
     * @param bias what is added
     * @return this request
     */
    public GenerateRequest logitBias(int token, float bias) {
        synchronized (logitBias) {
            logitBias.put(token, bias);
        }
        return this;
    }

    /**
     * The conversation that the request belongs to. Its keys and values are kept, in the store too. Send the whole
     * conversation as the prompt: only what is new is computed. Requests of one session run one at a time.
     *
     * @param session its name; {@code null} = none
     * @return this request
     */
    public GenerateRequest session(String session) {
        this.session = session;
        return this;
    }

    /**
     * Ends the request: the answers then have what was generated until then. In {@link Generator#generateAsync} and
     * {@link Generator#stream} it stands in for their own cancel.
     *
     * @param cancel what ends it; {@code null} = nothing does
     * @return this request
     */
    public GenerateRequest cancel(Cancel cancel) {
        this.cancel = cancel;
        return this;
    }

    /**
     * Which tokens stay in the slots of the request's sequences; default: as the generator was opened. That must have been
     * with a policy that needs as much of the model. The slots stay the generator's: leave them out.
     *
     * @param kvPolicy the policy; {@code null} = the generator's
     * @return this request
     */
    public GenerateRequest kvPolicy(KvPolicy kvPolicy) {
        this.kvPolicy = kvPolicy;
        return this;
    }

    /**
     * What the answer has to look like, as JSON. {@code {"json_schema": {...}}}: JSON that is valid by this JSON Schema;
     * {@code {"regex": "[0-9]+"}}: a text that matches as a whole; {@code {"choice": ["yes", "no"]}}: one of these texts;
     * {@code {"lark": "start: ..."}}: a text of this grammar.
     *
     * @param grammar JSON; {@code null} = any text
     * @return this request
     */
    public GenerateRequest grammar(String grammar) {
        this.grammar = grammar;
        return this;
    }

    /**
     * The maximum number of tokens that are guessed for one step, 0 to 64. The answer is the same, sooner where much of it
     * repeats the prompt. Default: as the generator was opened.
     *
     * @param maxDraft how many
     * @return this request
     */
    public GenerateRequest maxDraft(int maxDraft) {
        this.maxDraft = Native.unsigned(maxDraft, "maxDraft");
        return this;
    }

    /**
     * A beam search, of which the answers are the {@link #n} best, the best first; default: none. There are fewer answers where
     * fewer are found. Nothing is drawn, and the request has no session. A stream gets no token before the search has ended:
     * then those of the first answer come, then those of the second, and so on.
     *
     * @param beams the search; {@code null} = none
     * @return this request
     */
    public GenerateRequest beams(BeamOptions beams) {
        this.beams = beams;
        return this;
    }

    Cancel cancel() {
        return cancel;
    }

    /**
     * All but the tokens and the cancel, in the order that generator.c reads them. A new field of pagoda.h is a field and a
     * method above, a number or a text here, and a line there.
     */
    Packed pack() {
        Packed to = new Packed();
        to.numbers(maxNewTokens, minNewTokens, doSample, temperature, topK, topP, minP, repetitionPenalty,
                presencePenalty, frequencyPenalty, noRepeatNgramSize, forcedEos, ignoreEos, includeStop,
                skipSpecial, logprobs, promptLogprobs, n, echo, priority, contextEnd, addGenerationPrompt, maxDraft);
        to.numbers(hasSeed ? 1 : 0, seed, timeoutUs);
        to.text(prompt, "prompt");
        to.text(messages, "messages");
        to.text(tools, "tools");
        to.text(variables, "variables");
        to.text(session, "session");
        to.text(grammar, "grammar");
        to.texts(stop, "stop");
        to.ints(stopTokens);
        synchronized (logitBias) {
            to.ints(logitBias.keySet().stream().mapToInt(token -> token).toArray());
            to.ints(logitBias.values().stream().mapToInt(Float::floatToRawIntBits).toArray());
        }
        KvPolicy.pack(kvPolicy, to);
        BeamOptions.pack(beams, to);
        return to;
    }

    Tokens packTokens() {
        return Tokens.of(tokens);
    }

    /** The tokens for C: in an array, or in a direct buffer, or none. */
    record Tokens(int[] array, IntBuffer direct) {
        private static Tokens of(IntBuffer from) {
            if (from == null || from.isDirect() && from.order() == ByteOrder.nativeOrder()) {
                return new Tokens(null, from);
            }
            int[] copy = new int[from.limit()];
            from.get(0, copy);
            return new Tokens(copy, null);
        }
    }
}
