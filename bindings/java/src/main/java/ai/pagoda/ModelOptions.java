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
    private long tf32 = Native.UNSET;
    private long hostPools = Native.UNSET;
    private Path onnxruntimePath;
    private Path profilePath;
    private Embeddings tables;

    /** The defaults. */
    public ModelOptions() {}

    /**
     * Where the model runs; default {@link Provider#AUTO}.
     *
     * @param provider where
     * @return these options
     */
    public ModelOptions provider(Provider provider) {
        this.provider = Objects.requireNonNull(provider, "provider").number;
        return this;
    }

    /**
     * The number of the GPU; default 0.
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
     * How far the graph is optimized; default {@link Optimization#ALL}.
     *
     * @param optimization how much
     * @return these options
     */
    public ModelOptions optimization(Optimization optimization) {
        this.optimization = Objects.requireNonNull(optimization, "optimization").number;
        return this;
    }

    /**
     * Whether idle threads sleep; default: they spin for a while after each run, which wakes them sooner and takes
     * cores from everything else in the process.
     *
     * @param sleepWhenIdle whether they sleep
     * @return these options
     */
    public ModelOptions sleepWhenIdle(boolean sleepWhenIdle) {
        this.sleepWhenIdle = sleepWhenIdle ? 1 : 0;
        return this;
    }

    /**
     * Whether f32 matrix products on a GPU may use TF32, which keeps 10 bits of the fraction and is several times as
     * fast; default: they are computed in f32.
     *
     * @param tf32 whether they may
     * @return these options
     */
    public ModelOptions tf32(boolean tf32) {
        this.tf32 = tf32 ? 1 : 0;
        return this;
    }

    /**
     * Whether the ai.pagoda operators stay on the CPU even if the rest of the model runs on a GPU, so that pools of
     * keys and values in host memory are used in place; default: they run where the model runs.
     *
     * @param hostPools whether they do
     * @return these options
     */
    public ModelOptions hostPools(boolean hostPools) {
        this.hostPools = hostPools ? 1 : 0;
        return this;
    }

    /**
     * The ONNX Runtime library; default: the environment variable {@code PAGODA_ONNXRUNTIME}, then the folder
     * {@code pagoda} beside libpagoda.so, then the folder of libpagoda.so, then the loader of the system. A process
     * loads one, for its first model.
     *
     * @param onnxruntimePath its file; {@code null} = the default
     * @return these options
     */
    public ModelOptions onnxruntimePath(Path onnxruntimePath) {
        this.onnxruntimePath = onnxruntimePath;
        return this;
    }

    /**
     * Where to write a profile of all runs when the model is closed, in Chrome's trace format; default: no profile.
     *
     * @param profilePath the beginning of the name of the file; {@code null} = no profile
     * @return these options
     */
    public ModelOptions profilePath(Path profilePath) {
        this.profilePath = profilePath;
        return this;
    }

    /**
     * The tables that EmbeddingBag nodes of the graph name; default: none. The model keeps them open.
     *
     * @param tables the tables; {@code null} = none
     * @return these options
     */
    public ModelOptions tables(Embeddings tables) {
        this.tables = tables;
        return this;
    }

    /** In the order that model.c reads them. */
    long[] numbers() {
        return new long[] {provider, deviceId, intraOpThreads, optimization, sleepWhenIdle, tf32, hostPools,
                tables == null ? 0 : tables.handle()};
    }

    byte[] onnxruntimeText() {
        return onnxruntimePath == null ? null : Native.text(onnxruntimePath.toString(), "onnxruntimePath");
    }

    byte[] profileText() {
        return profilePath == null ? null : Native.text(profilePath.toString(), "profilePath");
    }
}
