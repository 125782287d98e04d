package ai.pagoda;

import ai.pagoda.TokenStream.Generating;
import java.lang.ref.Reference;
import java.nio.IntBuffer;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;

/**
 * An open model folder of a language model, with the keys and values of its sequences. Requests of concurrent callers run
 * together by continuous batching. Closing it ends the requests that wait or run on threads of Pagoda, with what they have,
 * writes the pool to the store if there is one, and waits for both.
 */
public final class Generator extends NativeObject {
    static {
        Native.load();
    }

    private Generator(long handle) {
        super(handle, Generator::free);
    }

    /**
     * Opens a model folder with the default options.
     *
     * @param folder the folder
     * @return the generator
     */
    public static Generator open(Path folder) {
        return open(folder, new GeneratorOptions());
    }

    /**
     * Opens a model folder of a language model, and checks all its files.
     *
     * @param folder the folder
     * @param options how
     * @return the generator
     */
    public static Generator open(Path folder, GeneratorOptions options) {
        Pagoda.outsideHandler();
        byte[] text = Native.text(Objects.requireNonNull(folder, "folder").toString(), "folder");
        ModelOptions model = Objects.requireNonNull(options, "options").model();
        Packed packed = options.pack();
        try {
            return new Generator(open(text, packed.numbers(), packed.texts(), packed.ints(), model.numbers(),
                    model.onnxruntimeText(), model.profileText(), options.storeOptions().numbers()));
        } finally {
            Reference.reachabilityFence(model);
        }
    }

    /**
     * Answers a request, and waits for the end of all its answers. A request that was cancelled or exceeded its time limit is
     * no error: the answers have what was generated until then.
     *
     * @param request what is asked
     * @return the answers
     */
    public GenerateResponse generate(GenerateRequest request) {
        Packed packed = request.pack();
        GenerateRequest.Tokens tokens = request.packTokens();
        Cancel cancel = request.cancel();
        try {
            long response = generate(handle(), packed.numbers(), packed.texts(), packed.ints(), tokens.array(),
                    tokens.direct(),
                    cancel == null ? 0 : cancel.handle());
            try {
                return read(response);
            } finally {
                freeResponse(response);
            }
        } finally {
            Reference.reachabilityFence(cancel);
            Reference.reachabilityFence(tokens);
        }
    }

    /**
     * Starts to answer a request on a thread of Pagoda, and returns at once. An error in the request itself is thrown at once.
     * When this returns, the request may be changed.
     *
     * @param request what is asked
     * @return what {@link #generate} returns or throws; to cancel it ends the request, unless that has a cancel of its own,
     *     which then does so alone
     */
    public CompletableFuture<GenerateResponse> generateAsync(GenerateRequest request) {
        return start(request, false);
    }

    /**
     * The same with the tokens as they are generated. With {@link Driver#CALLER} another thread has to run the steps.
     *
     * @param request what is asked
     * @return the tokens, and the response
     */
    public TokenStream stream(GenerateRequest request) {
        return new TokenStream(start(request, true));
    }

    private Generating start(GenerateRequest request, boolean streams) {
        Packed packed = request.pack();
        GenerateRequest.Tokens tokens = request.packTokens();
        Cancel cancel = request.cancel();
        long handle = handle();
        Generating generating = new Generating(cancel);
        try {
            generating.start(() -> generateAsync(handle, packed.numbers(), packed.texts(), packed.ints(), tokens.array(),
                    tokens.direct(),
                    generating.cancelHandle(), streams, generating));
            return generating;
        } finally {
            Reference.reachabilityFence(cancel);
            Reference.reachabilityFence(tokens);
        }
    }

    /**
     * Runs one step of a generator with {@link Driver#CALLER}: the model once, for all sequences that run. A failure of the
     * model is an error of the requests.
     *
     * @return whether there is more to do; a request that waits for the store is more to do
     */
    public boolean step() {
        return step(handle());
    }

    /**
     * The tokens of the prompt of a request, as a request with it would have them. The rest of the request is checked, and
     * not used.
     *
     * @param request the request
     * @return the tokens
     */
    public int[] tokenize(GenerateRequest request) {
        Packed packed = request.pack();
        GenerateRequest.Tokens tokens = request.packTokens();
        try {
            return tokenize(handle(), packed.numbers(), packed.texts(), packed.ints(), tokens.array(),
                    tokens.direct());
        } finally {
            Reference.reachabilityFence(tokens);
        }
    }

    /**
     * The text of tokens. A token that the vocabulary does not have has no text.
     *
     * @param tokens the tokens
     * @param skipSpecial whether special tokens are left out
     * @return the text
     */
    public String detokenize(int[] tokens, boolean skipSpecial) {
        return Native.string(detokenize(handle(), Objects.requireNonNull(tokens, "tokens"), skipSpecial));
    }

    /**
     * Removes all data of sessions: their keys and values, in the pool, in host memory and in the store. Pages that they
     * share with others stay.
     *
     * @param sessions the sessions
     * @return how many were known
     */
    public long forget(String... sessions) {
        return forget(handle(), Native.texts(List.of(sessions), "sessions"), sessions.length);
    }

    /**
     * Evicts the keys and values of sessions from the pool to host memory and the store. Without either they are lost, and
     * must be computed again.
     *
     * @param sessions the sessions
     * @return how many had any in the pool
     */
    public long unload(String... sessions) {
        return unload(handle(), Native.texts(List.of(sessions), "sessions"), sessions.length);
    }

    /**
     * Starts to load the keys and values of sessions from host memory and the store into the pool, and returns at once: their
     * next request need not wait. Stops when the pool is full.
     *
     * @param sessions the sessions
     * @return how many are being loaded
     */
    public long prefetch(String... sessions) {
        return prefetch(handle(), Native.texts(List.of(sessions), "sessions"), sessions.length);
    }

    /**
     * Drops all sessions, and all prefixes that no request uses now, from the pool.
     *
     * @param stored whether from host memory and the store, too
     * @return how many histories there were
     */
    public long clear(boolean stored) {
        return clear(handle(), stored);
    }

    /**
     * Sets whether tokens are guessed where requests allow it ({@link GenerateRequest#maxDraft}), from the next step on. They
     * are when the generator was opened.
     *
     * @param on whether they are
     */
    public void setSpeculation(boolean on) {
        setSpeculation(on, false);
    }

    /**
     * The same. With {@code clear} that step also forgets how good guesses were and what they cost, and counts them from 0
     * again.
     *
     * @param on whether they are
     * @param clear whether it forgets
     */
    public void setSpeculation(boolean on, boolean clear) {
        setSpeculation(handle(), on, clear);
    }

    /**
     * Where the model runs.
     *
     * @return the provider, the GPU, and why
     */
    public EngineProvider provider() {
        long[] where = new long[2];
        String reason = Native.string(provider(handle(), where));
        return new EngineProvider(Provider.of((int) where[0]), (int) where[1], reason);
    }

    /**
     * The pagoda.json of the model: its special tokens, defaults of generation, limits and version.
     *
     * @return the JSON
     */
    public String info() {
        return Native.string(info(handle()));
    }

    /**
     * The state and the counters of the generator.
     *
     * @return the numbers
     */
    public GeneratorStats stats() {
        return GeneratorStats.of(stats(handle()));
    }

    /**
     * The statistics of the cache of keys and values. Owners are sequences and sessions.
     *
     * @return the statistics
     */
    public KvStats kvStats() {
        return KvStats.of(kvStats(handle()));
    }

    /** All of a response, which stays the caller's. */
    static GenerateResponse read(long response) {
        Object[] info = responseInfo(response);
        long[] numbers = (long[]) info[0];
        Choice[] choices = new Choice[Math.toIntExact(numbers[2])];
        Arrays.setAll(choices, index -> readChoice(response, index));
        return new GenerateResponse(List.of(choices), (int[]) info[1], logprobs(response, -1, numbers[3]),
                Math.toIntExact(numbers[0]), numbers[1], Native.string((byte[]) info[2]));
    }

    private static Choice readChoice(long response, int index) {
        Object[] choice = responseChoice(response, index);
        long[] numbers = (long[]) choice[0];
        return new Choice(Native.string((byte[]) choice[1]), (int[]) choice[2], logprobs(response, index, numbers[1]),
                FinishReason.of((int) numbers[0]), Native.string((byte[]) choice[3]), Duration.ofNanos(numbers[2]),
                Duration.ofNanos(numbers[3]), Duration.ofNanos(numbers[4]),
                numbers[5] == 0 ? null : Float.intBitsToFloat((int) numbers[6]));
    }

    /** Of the tokens of an answer; -1: of the prompt. */
    private static List<TokenLogprobs> logprobs(long response, int choice, long count) {
        TokenLogprobs[] all = new TokenLogprobs[Math.toIntExact(count)];
        Arrays.setAll(all, index -> {
            Object[] one = responseLogprobs(response, choice, index);
            int[] own = (int[]) one[0];
            return TokenLogprobs.of(Float.intBitsToFloat(own[0]), own[1], (int[]) one[1], (float[]) one[2]);
        });
        return List.of(all);
    }

    private static native long open(byte[] folder, long[] numbers, byte[] texts, int[] ints, long[] model,
            byte[] onnxruntime, byte[] profile, long[] storeNumbers);

    /** Returns a response. */
    private native long generate(long handle, long[] numbers, byte[] texts, int[] ints, int[] tokens,
            IntBuffer direct, long cancel);

    private native void generateAsync(long handle, long[] numbers, byte[] texts, int[] ints, int[] tokens,
            IntBuffer direct, long cancel, boolean streams, Generating generating);

    private native boolean step(long handle);

    private native int[] tokenize(long handle, long[] numbers, byte[] texts, int[] ints, int[] tokens,
            IntBuffer direct);

    private native byte[] detokenize(long handle, int[] tokens, boolean skipSpecial);

    private native long forget(long handle, byte[] sessions, long count);

    private native long unload(long handle, byte[] sessions, long count);

    private native long prefetch(long handle, byte[] sessions, long count);

    private native long clear(long handle, boolean stored);

    private native void setSpeculation(long handle, boolean on, boolean clear);

    private native byte[] provider(long handle, long[] where);

    private native byte[] info(long handle);

    private native long[] stats(long handle);

    private native long[] kvStats(long handle);

    /** Numbers, the tokens of the prompt, the version. */
    private static native Object[] responseInfo(long response);

    /** Numbers, the text, the tokens, what is missing. */
    private static native Object[] responseChoice(long response, long choice);

    /** The bits of the log probability and the rank, the most likely tokens, their log probabilities. */
    private static native Object[] responseLogprobs(long response, long choice, long index);

    private static native void freeResponse(long response);

    private static native void free(long handle);
}
