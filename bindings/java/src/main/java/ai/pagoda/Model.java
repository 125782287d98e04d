package ai.pagoda;

import java.lang.ref.Reference;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;

/** An open model. Any number of threads may run one at the same time; closing it lets runs that are under way end. */
public final class Model extends NativeObject {
    static {
        Native.load();
    }

    private final Provider provider;
    private final String providerReason;
    private final List<ValueInfo> inputs;
    private final List<ValueInfo> outputs;

    /** All that C shows by pointer is read here: later another thread might close the model meanwhile. */
    private Model(long handle) {
        super(handle, Model::free);
        try {
            byte[][] reason = new byte[1][];
            provider = Provider.of(provider(handle, reason));
            providerReason = Native.string(reason[0]);
            inputs = values(handle, false);
            outputs = values(handle, true);
        } catch (Throwable error) {
            close();
            throw error;
        }
    }

    /**
     * Opens the model in an .onnx file, with the default options.
     *
     * @param path the file
     * @return the model
     */
    public static Model open(Path path) {
        return open(path, new ModelOptions());
    }

    /**
     * Opens the model in an .onnx file.
     *
     * @param path the file
     * @param options how
     * @return the model
     */
    public static Model open(Path path, ModelOptions options) {
        Pagoda.outsideHandler();
        byte[] text = Native.text(Objects.requireNonNull(path, "path").toString(), "path");
        try {
            return new Model(open(text, Objects.requireNonNull(options, "options").numbers(), options.onnxruntimeText(),
                    options.profileText()));
        } finally {
            Reference.reachabilityFence(options);
        }
    }

    /**
     * Opens a model from the bytes of an .onnx file.
     *
     * @param bytes the bytes; they are copied
     * @param options how
     * @return the model
     */
    public static Model openMemory(byte[] bytes, ModelOptions options) {
        Pagoda.outsideHandler();
        Objects.requireNonNull(bytes, "bytes");
        try {
            return new Model(openMemory(bytes, Objects.requireNonNull(options, "options").numbers(),
                    options.onnxruntimeText(), options.profileText()));
        } finally {
            Reference.reachabilityFence(options);
        }
    }

    /**
     * Where the model runs.
     *
     * @return {@link Provider#CPU} or {@link Provider#CUDA}
     */
    public Provider provider() {
        handle();
        return provider;
    }

    /**
     * Why {@link Provider#AUTO} became the CPU.
     *
     * @return the reason; empty if it did not, or was not asked for
     */
    public String providerReason() {
        handle();
        return providerReason;
    }

    /**
     * What goes in.
     *
     * @return the inputs
     */
    public List<ValueInfo> inputs() {
        handle();
        return inputs;
    }

    /**
     * What comes out.
     *
     * @return the outputs
     */
    public List<ValueInfo> outputs() {
        handle();
        return outputs;
    }

    /**
     * Runs the model and waits for it.
     *
     * @param inputs the inputs by name; every input must be there
     * @param outputs the names of the outputs wanted
     * @return new tensors for those outputs
     */
    public Outputs run(Map<String, Tensor> inputs, String... outputs) {
        return run(inputs, List.of(outputs), Map.of(), null);
    }

    /**
     * Runs the model and waits for it. Nothing is copied between the memory of the tensors and the run, except strings.
     * One tensor may be an input and an output at once, if the model's operators allow that, as pools of keys and
     * values do.
     *
     * @param inputs the inputs by name; every input must be there
     * @param outputs the names of the outputs for which new tensors are wanted
     * @param bound outputs by name that are written into tensors that are there
     * @param cancel stops it; {@code null} = nothing does
     * @return new tensors for the {@code outputs}
     */
    public Outputs run(Map<String, Tensor> inputs, List<String> outputs, Map<String, Tensor> bound, Cancel cancel) {
        Lists lists = new Lists(inputs, outputs, bound);
        try {
            run(handle(), lists.inputNames, lists.inputs, lists.outputNames, lists.outputs,
                    cancel == null ? 0 : cancel.handle());
            return new Outputs(lists.made, lists.outputs);
        } finally {
            Reference.reachabilityFence(lists);
            Reference.reachabilityFence(cancel);
        }
    }

    /**
     * Has the model run on a thread of Pagoda's and returns at once.
     *
     * @param inputs the inputs by name; every input must be there
     * @param outputs the names of the outputs wanted
     * @return what {@link #run(Map, String...)} returns or throws; to cancel it stops the run
     */
    public CompletableFuture<Outputs> runAsync(Map<String, Tensor> inputs, String... outputs) {
        return runAsync(inputs, List.of(outputs), Map.of(), null);
    }

    /**
     * Has the model run on a thread of Pagoda's and returns at once. What is wrong with the arguments is thrown at
     * once. The tensors may be closed as soon as this returns, but their memory must be left alone until the future is
     * done. To cancel the future completes it at once and stops the run before its graph's next node; till then it may
     * still use the memory.
     *
     * @param inputs the inputs by name; every input must be there
     * @param outputs the names of the outputs for which new tensors are wanted
     * @param bound outputs by name that are written into tensors that are there
     * @param cancel stops it instead of the future's own cancel, which then only ends the waiting; {@code null} = none
     * @return new tensors for the {@code outputs}; the caller closes them, and a future that was cancelled does
     */
    public CompletableFuture<Outputs> runAsync(
            Map<String, Tensor> inputs, List<String> outputs, Map<String, Tensor> bound, Cancel cancel) {
        Lists lists = new Lists(inputs, outputs, bound);
        long handle = handle();
        Run run = new Run(lists.made, cancel);
        try {
            return run.start(() -> runAsync(handle, lists.inputNames, lists.inputs, lists.outputNames, lists.outputs,
                    lists.made.size(), run.cancelHandle(), run));
        } finally {
            Reference.reachabilityFence(lists);
            Reference.reachabilityFence(cancel);
        }
    }

    private static List<ValueInfo> values(long handle, boolean outputs) {
        List<ValueInfo> values = new ArrayList<>();
        for (long i = 0, count = count(handle, outputs); i < count; i++) {
            Object[] parts = new Object[3];
            int type = value(handle, outputs, i, parts);
            values.add(ValueInfo.of(type, (byte[]) parts[0], (long[]) parts[1], (byte[]) parts[2]));
        }
        return List.copyOf(values);
    }

    /** The arguments of a run as C takes them: new outputs first, then bound ones. Keeps the tensors within reach. */
    private static final class Lists {
        final List<String> made;
        final byte[] inputNames;
        final byte[] outputNames;
        final long[] inputs;
        final long[] outputs;
        private final List<Tensor> tensors = new ArrayList<>();

        Lists(Map<String, Tensor> inputs, List<String> outputs, Map<String, Tensor> bound) {
            made = List.copyOf(outputs);
            List<String> names = new ArrayList<>();
            this.inputs = handles(inputs, "inputs", false, names, 0);
            inputNames = Native.texts(names, "inputs");
            names = new ArrayList<>(made);
            this.outputs = handles(bound, "bound", true, names, made.size());
            outputNames = Native.texts(names, "outputs");
        }

        private long[] handles(Map<String, Tensor> from, String what, boolean write, List<String> names, int skip) {
            List<Long> handles = new ArrayList<>();
            from.forEach((name, tensor) -> {
                Objects.requireNonNull(tensor, () -> what + ": the tensor of " + name);
                if (write && tensor.readOnly) {
                    throw new IllegalArgumentException(what + ": the memory of " + name + " can not be written to");
                }
                names.add(name);
                tensors.add(tensor);
                handles.add(tensor.handle());
            });
            long[] all = new long[skip + handles.size()];
            for (int i = 0; i < handles.size(); i++) {
                all[skip + i] = handles.get(i);
            }
            return all;
        }
    }

    /** A run under way. */
    static final class Run extends Pending<Outputs> {
        private final List<String> names;

        Run(List<String> names, Cancel cancel) {
            super(cancel);
            this.names = names;
        }

        /** Called by the native part, on a thread of Pagoda's. */
        void done(Throwable error, long[] outputs) {
            try {
                ended(error, error == null ? new Outputs(names, outputs) : null, Outputs::close);
            } catch (Throwable failure) {
                failed(failure);
            }
        }
    }

    private static native long open(byte[] path, long[] numbers, byte[] onnxruntime, byte[] profile);

    private static native long openMemory(byte[] bytes, long[] numbers, byte[] onnxruntime, byte[] profile);

    private static native int provider(long handle, byte[][] reason);

    private static native long count(long handle, boolean outputs);

    private static native int value(long handle, boolean outputs, long index, Object[] parts);

    private native void run(
            long handle, byte[] inputNames, long[] inputs, byte[] outputNames, long[] outputs, long cancel);

    private native void runAsync(long handle, byte[] inputNames, long[] inputs, byte[] outputNames, long[] outputs,
            int made, long cancel, Run run);

    private static native void free(long handle);
}
