package ai.pagoda;

import java.nio.file.Path;
import java.util.Objects;

/** How to open a model. What is not set stays at its default. */
public final class ModelOptions {
    private long provider = Native.UNSET;
    private long deviceId = Native.UNSET;
    private long intraOpThreads = Native.UNSET;
    private long optimization = Native.UNSET;
    private long sleepWhenIdle = Native.UNSET;
    private Path onnxruntime;
    private Path profile;
    private Embeddings embedding;

    /** The defaults. */
    public ModelOptions() {}

    /**
     * Where it runs; default {@link Provider#AUTO}.
     *
     * @param provider where
     * @return these options
     */
    public ModelOptions provider(Provider provider) {
        this.provider = Objects.requireNonNull(provider, "provider").number;
        return this;
    }

    /**
     * Which GPU; default 0.
     *
     * @param deviceId its number
     * @return these options
     */
    public ModelOptions deviceId(int deviceId) {
        this.deviceId = deviceId;
        return this;
    }

    /**
     * Threads that work on one run; default 0: one for each core.
     *
     * @param intraOpThreads how many
     * @return these options
     */
    public ModelOptions intraOpThreads(int intraOpThreads) {
        this.intraOpThreads = intraOpThreads;
        return this;
    }

    /**
     * How much the graph is rewritten; default {@link Optimization#ALL}.
     *
     * @param optimization how much
     * @return these options
     */
    public ModelOptions optimization(Optimization optimization) {
        this.optimization = Objects.requireNonNull(optimization, "optimization").number;
        return this;
    }

    /**
     * Whether those threads sleep while there is nothing to do; default: they look out for work for a while after each
     * run, which wakes them sooner and takes cores from everything else in the process.
     *
     * @param sleepWhenIdle whether they sleep
     * @return these options
     */
    public ModelOptions sleepWhenIdle(boolean sleepWhenIdle) {
        this.sleepWhenIdle = sleepWhenIdle ? 1 : 0;
        return this;
    }

    /**
     * The ONNX Runtime library; default: the environment variable {@code PAGODA_ONNXRUNTIME}, then the folder
     * {@code pagoda} beside libpagoda.so, then right beside it, then the system's loader. A process uses one; the first model decides.
     *
     * @param onnxruntime its file; {@code null} = the default
     * @return these options
     */
    public ModelOptions onnxruntime(Path onnxruntime) {
        this.onnxruntime = onnxruntime;
        return this;
    }

    /**
     * Where to write a profile of every run, in Chrome's trace format, when the model is closed; default: nowhere.
     *
     * @param profile the beginning of the file's name; {@code null} = nowhere
     * @return these options
     */
    public ModelOptions profile(Path profile) {
        this.profile = profile;
        return this;
    }

    /**
     * The tables that EmbeddingBag nodes of the graph name; default: none. The model keeps them open.
     *
     * @param embedding the tables; {@code null} = none
     * @return these options
     */
    public ModelOptions embedding(Embeddings embedding) {
        this.embedding = embedding;
        return this;
    }

    /** In the order that model.c reads them. */
    long[] numbers() {
        return new long[] {provider, deviceId, intraOpThreads, optimization, sleepWhenIdle,
                embedding == null ? 0 : embedding.handle()};
    }

    byte[] onnxruntimeText() {
        return onnxruntime == null ? null : Native.text(onnxruntime.toString(), "onnxruntime");
    }

    byte[] profileText() {
        return profile == null ? null : Native.text(profile.toString(), "profile");
    }
}
