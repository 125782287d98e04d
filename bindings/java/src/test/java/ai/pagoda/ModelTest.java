package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class ModelTest extends Support {
    /** y = x, of strings [n]. */
    private static final byte[] SAME_STRINGS = ("\b\b\22\0:9\n\20\n\1x\22\1y\"\bIdentity\22\1gZ\20\n\1x\22\13"
            + "\n\t\b\b\22\5\n\3\22\1nb\20\n\1y\22\13\n\t\b\b\22\5\n\3\22\1nB\4\n\0\20\21")
            .getBytes(StandardCharsets.ISO_8859_1);

    private static Tensor x() {
        return Tensor.of(new long[] {2, 4}, 1f, 2f, 3f, 4f, 0f, 0f, 0f, 0f);
    }

    private static void right(float[] y) {
        assertEquals(6, y.length);
        assertEquals(1, y[0] + y[1] + y[2], 1e-6);
        assertEquals(1 / 3f, y[4], 1e-6);
        assertTrue(Math.abs(y[0] - 1 / 3f) > 1e-3);
    }

    @Test
    void describes() {
        try (Model model = Model.open(HELLO, cpu())) {
            assertEquals(Provider.CPU, model.provider());
            assertEquals("", model.providerReason());
            assertEquals(List.of(new ValueInfo("x", ElementType.F32, true, List.of(-1L, 4L), List.of("n", ""))),
                    model.inputs());
            assertEquals(List.of("n", ""), model.outputs().get(0).symbols());
        }
        try (Model model = Model.open(HELLO)) {
            assertTrue(model.provider() == Provider.CUDA || !model.providerReason().isEmpty());
        }
    }

    /** Each reaches its own field. */
    @Test
    void optionsArrive(@TempDir Path folder) throws Exception {
        fails(Status.INVALID_ARGUMENT, "options.device_id", () -> Model.open(HELLO, cpu().deviceId(-1)));
        fails(Status.INVALID_ARGUMENT, "options.intra_op_threads", () -> Model.open(HELLO, cpu().intraOpThreads(-1)));
        fails(Status.INVALID_ARGUMENT, "options.provider", () -> Model.open(HELLO, cpu().provider(Provider.UNKNOWN)));
        ModelOptions options = cpu().optimization(Optimization.NONE).profilePath(folder.resolve("profile"))
                .onnxruntimePath(Path.of(System.getProperty("pagoda.native.dir"), "libonnxruntime.so.1"));
        try (Model model = Model.open(HELLO, options); Tensor x = x()) {
            model.run(Map.of("x", x), "y").close();
        }
        try (Stream<Path> files = Files.list(folder)) {
            assertTrue(files.anyMatch(file -> file.getFileName().toString().startsWith("profile")));
        }
    }

    @Test
    void runs() throws Exception {
        byte[] bytes = Files.readAllBytes(HELLO);
        try (Model model = Model.open(HELLO, cpu()); Model same = Model.openMemory(bytes, cpu()); Tensor x = x();
                Outputs outputs = model.run(Map.of("x", x), "y"); Outputs again = same.run(Map.of("x", x), "y")) {
            right(outputs.get("y").floats());
            assertEquals(1, outputs.size());
            assertArrayEquals(outputs.get(0).floats(), again.iterator().next().floats());
            assertThrows(IllegalArgumentException.class, () -> outputs.get("z"));
        }
    }

    @Test
    void writesIntoMemoryThatIsThere() throws Exception {
        ByteBuffer memory = ByteBuffer.allocateDirect(24).order(ByteOrder.nativeOrder());
        try (Model model = Model.open(HELLO, cpu()); Tensor x = x();
                Tensor y = Tensor.of(ElementType.F32, memory, 2, 3)) {
            model.run(Map.of("x", x), List.of(), Map.of("y", y), null).close();
            right(y.floats());
            float first = memory.getFloat(0);
            memory.putFloat(0, 0);
            assertEquals(0, model.runAsync(Map.of("x", x), List.of(), Map.of("y", y), null).get().size());
            assertEquals(first, memory.getFloat(0));
            try (Tensor readOnly = Tensor.of(ElementType.F32,
                    memory.asReadOnlyBuffer().order(ByteOrder.nativeOrder()), 2, 3)) {
                assertTrue(readOnly.buffer().isReadOnly());
                assertThrows(IllegalArgumentException.class,
                        () -> model.run(Map.of("x", x), List.of(), Map.of("y", readOnly), null));
            }
        }
    }

    @Test
    void strings() {
        try (Model model = Model.openMemory(SAME_STRINGS, cpu());
                Tensor x = Tensor.of(new long[] {3}, "", "\u5854", "b\0c");
                Outputs outputs = model.run(Map.of("x", x), "y")) {
            assertArrayEquals(new String[] {"", "\u5854", "b\0c"}, outputs.get(0).strings());
        }
    }

    @Test
    void misuseIsAnException(@TempDir Path folder) throws Exception {
        fails(Status.NOT_FOUND, "path", () -> Model.open(folder.resolve("none.onnx")));
        fails(Status.MODEL, "bytes", () -> Model.openMemory(new byte[64], cpu()));
        assertThrows(NullPointerException.class, () -> Model.open(null));
        assertThrows(NullPointerException.class, () -> Model.openMemory(null, cpu()));
        assertThrows(NullPointerException.class, () -> Model.open(HELLO, null));
        try (Model model = Model.open(HELLO, cpu()); Tensor x = x(); Tensor wide = Tensor.zeros(ElementType.F32, 1, 5);
                Tensor other = Tensor.zeros(ElementType.I64, 1, 4);
                Tensor small = Tensor.zeros(ElementType.F32, 1, 3)) {
            fails(Status.INVALID_ARGUMENT, "inputs[0]", () -> model.run(Map.of("x", wide), "y"));
            fails(Status.INVALID_ARGUMENT, "inputs[0]", () -> model.run(Map.of("x", other), "y"));
            fails(Status.NOT_FOUND, "input_names[0]", () -> model.run(Map.of("z", x), "y"));
            fails(Status.NOT_FOUND, "output_names[0]", () -> model.run(Map.of("x", x), "z"));
            fails(Status.NOT_FOUND, "output_names[0]", () -> model.runAsync(Map.of("x", x), "z"));
            assertThrows(PagodaException.class, () -> model.run(Map.of("x", x), List.of(), Map.of("y", small), null));
            assertThrows(NullPointerException.class, () -> model.run(null, "y"));
            assertThrows(NullPointerException.class, () -> model.run(Map.of("x", x), (String) null));
            Map<String, Tensor> holes = new HashMap<>();
            holes.put("x", null);
            assertThrows(NullPointerException.class, () -> model.run(holes, "y"));
            Tensor closed = x();
            closed.close();
            fails(Status.INVALID_HANDLE, "", () -> model.run(Map.of("x", closed), "y"));
            fails(Status.INVALID_HANDLE, "", () -> model.run(Map.of("x", x), List.of(), Map.of("y", closed), null));
            Cancel cancel = new Cancel();
            cancel.close();
            fails(Status.INVALID_HANDLE, "", () -> model.run(Map.of("x", x), List.of("y"), Map.of(), cancel));
            fails(Status.INVALID_HANDLE, "", () -> model.runAsync(Map.of("x", x), List.of("y"), Map.of(), cancel));
            model.close();
            model.close();
            fails(Status.INVALID_HANDLE, "", () -> model.run(Map.of("x", x), "y"));
            fails(Status.INVALID_HANDLE, "", () -> model.runAsync(Map.of("x", x), "y"));
            fails(Status.INVALID_HANDLE, "", model::inputs);
            fails(Status.INVALID_HANDLE, "", model::provider);
        }
    }

    @Test
    void runsOnPagodasThreads() throws Exception {
        List<CompletableFuture<Outputs>> futures = new ArrayList<>();
        // Model and tensors go while the runs are under way.
        try (Model model = Model.open(HELLO, cpu())) {
            for (int i = 0; i < 100; i++) {
                try (Tensor x = x()) {
                    futures.add(model.runAsync(Map.of("x", x), "y"));
                }
            }
        }
        for (CompletableFuture<Outputs> future : futures) {
            try (Outputs outputs = future.get(20, TimeUnit.SECONDS)) {
                right(outputs.get("y").floats());
            }
        }
    }

    /** What hangs on a future may wait for other runs: it is not on a thread that those need. */
    @Test
    void dependentsMayRunTheModel() throws Exception {
        try (Model model = Model.open(HELLO, cpu()); Tensor x = x()) {
            CompletableFuture<Float> first = model.runAsync(Map.of("x", x), "y").thenApply(outputs -> {
                assertNotEquals("pagoda", Thread.currentThread().getName());
                outputs.close();
                try (Outputs again = model.runAsync(Map.of("x", x), "y").join()) {
                    return again.get(0).floats()[4];
                }
            });
            assertEquals(1 / 3f, first.get(20, TimeUnit.SECONDS), 1e-6);
        }
    }

    @Test
    void cancels() throws Exception {
        try (Model model = Model.open(HELLO, cpu()); Tensor x = x(); Cancel cancel = new Cancel()) {
            model.run(Map.of("x", x), List.of("y"), Map.of(), cancel).close();
            cancel.trigger();
            fails(Status.CANCELLED, "", () -> model.run(Map.of("x", x), List.of("y"), Map.of(), cancel));
            CompletableFuture<Outputs> future = model.runAsync(Map.of("x", x), List.of("y"), Map.of(), cancel);
            Throwable cause = assertThrows(ExecutionException.class, future::get).getCause();
            assertEquals(Status.CANCELLED, ((PagodaException) cause).status());
        }
    }

    /** As if there were no memory for the second of two outputs: the future is told, and the first one freed. */
    @Test
    void outputsThatCanNotBeTakenFailTheFuture() {
        try (Tensor first = Tensor.of(1f)) {
            Model.Run run = new Model.Run(List.of("a", "b"), null);
            run.done(null, new long[] {first.handle(), 1});
            Throwable cause = assertThrows(ExecutionException.class, () -> run.get(20, TimeUnit.SECONDS)).getCause();
            assertEquals(Status.INVALID_HANDLE, ((PagodaException) cause).status());
            assertEquals(0, Pagoda.liveObjects());
        }
        Engine.Ranking ranking = new Engine.Ranking(null);
        ranking.done(null, null, null, null);
        assertThrows(ExecutionException.class, () -> ranking.get(20, TimeUnit.SECONDS));
    }

    /** Long runs, cancelled by their futures: they end long before they would by themselves. */
    @Test
    void cancellingAFutureStopsTheRun() throws Exception {
        int rows = 6000;
        try (Model model = Model.open(MODEL, cpu());
                KvCache cache = KvCache.open(
                        new KvOptions().layers(2).heads(2).headSize(32).type(ElementType.F32)
                                .size(KvSize.pages(rows / 32 + 1)));
                KvLease lease = cache.prepare(new KvRequest(1, 0, rows - 1, 1));
                Tensor items = Tensor.of(new long[rows]);
                Tensor offsets = lease.rowOffsets(); Tensor candidates = lease.numCandidates();
                Tensor cached = lease.cachedLen(); Tensor indptr = lease.pageIndptr(); Tensor ids = lease.pageIds();
                Tensor pool0 = cache.pool(0); Tensor pool1 = cache.pool(1)) {
            Map<String, Tensor> inputs = Map.of("item_ids", items, "row_offsets", offsets, "num_candidates", candidates,
                    "cached_len", cached, "page_indptr", indptr, "page_ids", ids, "kv_pool_0", pool0, "kv_pool_1",
                    pool1);
            Map<String, Tensor> pools = Map.of("kv_pool_0_out", pool0, "kv_pool_1_out", pool1);
            long begin = System.nanoTime();
            try (Outputs whole = model.run(inputs, List.of("scores"), pools, null)) {
                assertEquals(rows, whole.get(0).size());
            }
            long one = System.nanoTime() - begin;
            long before = Pagoda.liveObjects();
            List<CompletableFuture<Outputs>> futures = new ArrayList<>();
            for (int i = 0; i < 40; i++) {
                futures.add(model.runAsync(inputs, List.of("scores"), pools, null));
            }
            begin = System.nanoTime();
            for (CompletableFuture<Outputs> future : futures) {
                assertTrue(future.cancel(true));
                assertTrue(future.isCancelled());
            }
            // The cancels of the runs live until those have ended.
            eventually(() -> Pagoda.liveObjects() <= before, () -> "runs go on");
            long all = System.nanoTime() - begin;
            assertTrue(all < 20 * one, "40 cancelled runs took " + all + " ns, and one that was not " + one + " ns");
        }
    }
}
