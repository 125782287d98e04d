package ai.pagoda;

import java.nio.file.Path;
import java.util.Objects;

/** How to open a generator. What is not set stays at its default. */
public final class GeneratorOptions {
    private long driver = Native.UNSET;
    private long sharePrefixes = Native.UNSET;
    private long maxBatch = Native.UNSET;
    private long maxBatchTokens = Native.UNSET;
    private long maxStretch = Native.UNSET;
    private long maxPromptTokens = Native.UNSET;
    private long maxNewTokens = Native.UNSET;
    private long queue = Native.UNSET;
    private long kvFormat = Native.UNSET;
    private long hostBytes = Native.UNSET;
    private long maxDraft = Native.UNSET;
    private long draftKvBytes = Native.UNSET;
    private KvSize kvSize = KvSize.DEFAULT;
    private KvPolicy kvPolicy;
    private ModelOptions model = new ModelOptions();
    private Path storePath;
    private StoreOptions storeOptions = new StoreOptions();
    private Path draftModel;

    /** The defaults. */
    public GeneratorOptions() {}

    /**
     * What runs the steps; default {@link Driver#THREAD}.
     *
     * @param driver what
     * @return these options
     */
    public GeneratorOptions driver(Driver driver) {
        this.driver = Objects.requireNonNull(driver, "driver").number;
        return this;
    }

    /**
     * Whether sequences share the pages of equal prefixes; default: they do.
     *
     * @param sharePrefixes whether they do
     * @return these options
     */
    public GeneratorOptions sharePrefixes(boolean sharePrefixes) {
        this.sharePrefixes = sharePrefixes ? 1 : 0;
        return this;
    }

    /**
     * The maximum number of sequences that run at the same time; default 64.
     *
     * @param maxBatch how many
     * @return these options
     */
    public GeneratorOptions maxBatch(int maxBatch) {
        this.maxBatch = maxBatch;
        return this;
    }

    /**
     * The maximum number of rows of a step: one for each sequence that decodes, and the chunks of prompts; default
     * 512.
     *
     * @param maxBatchTokens how many
     * @return these options
     */
    public GeneratorOptions maxBatchTokens(int maxBatchTokens) {
        this.maxBatchTokens = maxBatchTokens;
        return this;
    }

    /**
     * How much longer a step may take than one without prompts, while sequences decode; default 1.5. The chunks of
     * prompts are cut to keep it. At least 1.1; 0: no limit but {@link #maxBatchTokens}.
     *
     * @param maxStretch how much
     * @return these options
     */
    public GeneratorOptions maxStretch(float maxStretch) {
        this.maxStretch = Packed.bits(maxStretch);
        return this;
    }

    /**
     * The maximum number of tokens of a prompt; default 0: what the model's context has.
     *
     * @param maxPromptTokens how many
     * @return these options
     */
    public GeneratorOptions maxPromptTokens(int maxPromptTokens) {
        this.maxPromptTokens = maxPromptTokens;
        return this;
    }

    /**
     * The maximum number of new tokens that a request may ask for; default 0: what the model's context has.
     *
     * @param maxNewTokens how many
     * @return these options
     */
    public GeneratorOptions maxNewTokens(int maxNewTokens) {
        this.maxNewTokens = maxNewTokens;
        return this;
    }

    /**
     * The maximum number of answers that wait for their turn; default 4096. A request beyond it is rejected with
     * {@link Status#CAPACITY}.
     *
     * @param queue how many
     * @return these options
     */
    public GeneratorOptions queue(int queue) {
        this.queue = queue;
        return this;
    }

    /**
     * How pages hold keys and values, on the GPU, in host memory and on disk; default {@link KvFormat#DEFAULT}.
     *
     * @param kvFormat how
     * @return these options
     */
    public GeneratorOptions kvFormat(KvFormat kvFormat) {
        this.kvFormat = Objects.requireNonNull(kvFormat, "kvFormat").number;
        return this;
    }

    /**
     * Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
     * if the model can run on a GPU.
     *
     * @param hostBytes how many
     * @return these options
     */
    public GeneratorOptions hostBytes(long hostBytes) {
        this.hostBytes = Native.unsigned(hostBytes, "hostBytes");
        return this;
    }

    /**
     * The size of the pool of keys and values; default 1 GiB. A sequence that does not fit into it is rejected.
     *
     * @param kvSize the size
     * @return these options
     */
    public GeneratorOptions kvSize(KvSize kvSize) {
        this.kvSize = Objects.requireNonNull(kvSize, "kvSize");
        return this;
    }

    /**
     * A fixed number of slots for the keys and values of each sequence; default: all tokens stay. With a policy nothing is
     * shared between sequences, and a session goes on only behind what was computed of it.
     *
     * @param kvPolicy the policy; {@code null} = none
     * @return these options
     */
    public GeneratorOptions kvPolicy(KvPolicy kvPolicy) {
        this.kvPolicy = kvPolicy;
        return this;
    }

    /**
     * Where the model runs, and on how many threads.
     *
     * @param model how; it must not name tables
     * @return these options
     */
    public GeneratorOptions model(ModelOptions model) {
        this.model = Objects.requireNonNull(model, "model");
        return this;
    }

    /**
     * The folder of a store for keys and values; default: none. Sessions survive a restart in it. One process at a time
     * has it open.
     *
     * @param storePath the folder; {@code null} = none
     * @return these options
     */
    public GeneratorOptions storePath(Path storePath) {
        this.storePath = storePath;
        return this;
    }

    /**
     * How the store is opened.
     *
     * @param storeOptions how
     * @return these options
     */
    public GeneratorOptions storeOptions(StoreOptions storeOptions) {
        this.storeOptions = Objects.requireNonNull(storeOptions, "storeOptions");
        return this;
    }

    /**
     * The {@link GenerateRequest#maxDraft} of requests that do not say, 0 to 64; default 0: nothing is guessed.
     *
     * @param maxDraft how many
     * @return these options
     */
    public GeneratorOptions maxDraft(int maxDraft) {
        this.maxDraft = maxDraft;
        return this;
    }

    /**
     * The folder of a smaller model with the same tokenizer, which guesses tokens; default: they are looked up in the prompt
     * and the answer.
     *
     * @param draftModel the folder; {@code null} = none
     * @return these options
     */
    public GeneratorOptions draftModel(Path draftModel) {
        this.draftModel = draftModel;
        return this;
    }

    /**
     * Bytes of that model's pool of keys and values; default 256 MiB. What does not fit is not guessed.
     *
     * @param draftKvBytes how many
     * @return these options
     */
    public GeneratorOptions draftKvBytes(long draftKvBytes) {
        this.draftKvBytes = Native.unsigned(draftKvBytes, "draftKvBytes");
        return this;
    }

    ModelOptions model() {
        return model;
    }

    StoreOptions storeOptions() {
        return storeOptions;
    }

    /** In the order that generator.c reads them. */
    Packed pack() {
        Packed to = new Packed();
        to.numbers(driver, sharePrefixes, maxBatch, maxBatchTokens, maxStretch, maxPromptTokens, maxNewTokens, queue, kvFormat, hostBytes);
        to.numbers(kvSize.unit().number, kvSize.value());
        to.text(storePath == null ? null : storePath.toString(), "storePath");
        KvPolicy.pack(kvPolicy, to);
        to.numbers(maxDraft, draftKvBytes);
        to.text(draftModel == null ? null : draftModel.toString(), "draftModel");
        return to;
    }
}
