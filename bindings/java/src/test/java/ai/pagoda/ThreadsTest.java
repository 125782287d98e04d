package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.ref.WeakReference;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;

/** Eight threads on one object; nothing is left, which Support looks at. */
class ThreadsTest extends Support {
    private static final int THREADS = 8;

    private interface Work {
        void of(int thread, int round) throws Exception;
    }

    private static void everyone(int rounds, Work work) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(THREADS);
        try {
            List<Callable<Void>> all = new ArrayList<>();
            for (int thread = 0; thread < THREADS; thread++) {
                int mine = thread;
                all.add(() -> {
                    for (int round = 0; round < rounds; round++) {
                        work.of(mine, round);
                    }
                    return null;
                });
            }
            for (Future<Void> done : pool.invokeAll(all)) {
                done.get(60, TimeUnit.SECONDS);
            }
        } finally {
            pool.shutdown();
        }
    }

    @Test
    void runOneModel() throws Exception {
        try (Model model = Model.open(HELLO, cpu())) {
            everyone(200, (thread, round) -> {
                try (Tensor x = Tensor.of(new long[] {1, 4}, thread, round, 1f, 2f);
                        Outputs now = model.run(Map.of("x", x), "y");
                        Outputs later = model.runAsync(Map.of("x", x), "y").get(20, TimeUnit.SECONDS)) {
                    assertArrayEquals(now.get(0).floats(), later.get(0).floats());
                }
            });
        }
    }

    @Test
    void askOneEngine() throws Exception {
        EngineTest.User user = EngineTest.User.of("gather").get(0);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), new EngineOptions().model(cpu()).instances(2))) {
            everyone(40, (thread, round) -> {
                Map<String, Object> step = user.steps().get(round % user.steps().size());
                RankRequest request = user.request(thread, 0, EngineTest.User.events(step));
                EngineTest.User.right(step, round % 2 == 0 ? engine.rank(request)
                        : engine.rankAsync(request).get(20, TimeUnit.SECONDS));
            });
            assertEquals(8 * 40, engine.stats().answered());
        }
    }

    /** Nothing of a run, a request or a log is held when it has ended, nor a thread that has. */
    @Test
    void nothingIsHeld() throws Exception {
        List<WeakReference<Object>> ended = new ArrayList<>();
        runs(ended);
        Set<Thread> before = Thread.getAllStackTraces().keySet();
        requests(ended, before);
        eventually(() -> attached(before) == 0, () -> attached(before) + " threads of an engine are still attached");
        eventually(() -> {
            System.gc();
            return ended.stream().allMatch(one -> one.get() == null);
        }, () -> ended.stream().map(WeakReference::get).toList().toString());
    }

    private static void runs(List<WeakReference<Object>> ended) {
        int[] lines = new int[1];
        LogHandler handler = (level, source, message) -> lines[0]++;
        Pagoda.setLog(LogLevel.ERROR, handler);
        Pagoda.setLog(LogLevel.OFF, null);
        ended.add(new WeakReference<>(handler));
        try (Model model = Model.open(HELLO, cpu()); Tensor x = Tensor.zeros(ElementType.F32, 1, 4)) {
            CompletableFuture<Outputs> run = model.runAsync(Map.of("x", x), "y");
            run.join().close();
            ended.add(new WeakReference<>(run));
        }
    }

    private static void requests(List<WeakReference<Object>> ended, Set<Thread> before) throws Exception {
        EngineTest.User user = EngineTest.User.of("gather").get(0);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), new EngineOptions().model(cpu()).instances(4))) {
            for (int i = 0; i < 8; i++) {
                CompletableFuture<RankResponse> answered = engine.rankAsync(user.request(i, 0, 23));
                CompletableFuture<RankResponse> cancelled = engine.rankAsync(user.request(i, 0, 23));
                cancelled.cancel(true);
                answered.join();
                ended.add(new WeakReference<>(answered));
                ended.add(new WeakReference<>(cancelled));
            }
            assertTrue(attached(before) > 0);
        }
        try (Generator generator = GeneratorTest.open()) {
            TokenStream stream = generator.stream(GeneratorTest.likely(400));
            stream.iterator().next();
            stream.close();
            stream.response().join();
            ended.add(new WeakReference<>(stream));
            ended.add(new WeakReference<>(stream.response()));
        }
    }

    @Test
    void askOneGenerator() throws Exception {
        try (Generator generator = GeneratorTest.open()) {
            List<int[]> alone = new ArrayList<>();
            for (int i = 0; i < THREADS; i++) {
                alone.add(generator.generate(GeneratorTest.likely(12).tokens(20 + i, 5, 6)).choices().get(0).tokens());
            }
            everyone(10, (thread, round) -> {
                GenerateRequest request = GeneratorTest.likely(12).tokens(20 + thread, 5, 6);
                int[] tokens;
                if (round % 2 == 0) {
                    tokens = generator.generate(request).choices().get(0).tokens();
                } else {
                    tokens = generator.stream(request).tokens().mapToInt(Token::id).toArray();
                }
                assertArrayEquals(alone.get(thread), tokens);
            });
        }
    }

    /** A generator that is closed while others use it ends their answers, or says that it was closed. */
    @Test
    void closeAGenerator() throws Exception {
        for (int i = 0; i < 5; i++) {
            Generator generator = GeneratorTest.open();
            everyone(4, (thread, round) -> {
                if (thread == 0) {
                    Thread.sleep(round);
                    if (round == 3) {
                        generator.close();
                    }
                    return;
                }
                try {
                    GenerateResponse response = thread % 2 == 0 ? generator.generate(GeneratorTest.likely(20))
                            : generator.stream(GeneratorTest.likely(20)).response().get(20, TimeUnit.SECONDS);
                    FinishReason reason = response.choices().get(0).finishReason();
                    assertTrue(reason == FinishReason.LENGTH || reason == FinishReason.CANCELLED, reason.toString());
                } catch (PagodaException error) {
                    assertEquals(Status.INVALID_HANDLE, error.status());
                }
            });
        }
    }

    private static long attached(Set<Thread> before) {
        List<Thread> all = Thread.getAllStackTraces().keySet().stream()
                .filter(thread -> thread.getName().equals("pagoda") && !before.contains(thread)).toList();
        assertTrue(all.stream().allMatch(Thread::isDaemon));
        return all.size();
    }

    /** Some close what others use: each call either works or says that it was closed. */
    @Test
    void closeWhatOthersUse() throws Exception {
        AtomicInteger worked = new AtomicInteger();
        AtomicInteger refused = new AtomicInteger();
        try (Model model = Model.open(HELLO, cpu())) {
            Tensor[] shared = new Tensor[1];
            shared[0] = Tensor.of(new long[] {1, 4}, 1f, 2f, 3f, 4f);
            everyone(300, (thread, round) -> {
                Tensor mine;
                synchronized (shared) {
                    mine = shared[0];
                    if (thread == 0) {
                        shared[0] = Tensor.of(new long[] {1, 4}, 1f, 2f, 3f, 4f);
                    }
                }
                if (thread == 0) {
                    mine.close();
                    return;
                }
                try (Outputs outputs = model.run(Map.of("x", mine), "y")) {
                    assertEquals(3, outputs.get(0).floats().length);
                    assertEquals(2f, thread % 2 == 0 ? mine.floats()[1] : mine.floatBuffer().get(1));
                    worked.incrementAndGet();
                } catch (PagodaException error) {
                    assertEquals(Status.INVALID_HANDLE, error.status());
                    refused.incrementAndGet();
                }
            });
            shared[0].close();
        }
        assertEquals(7 * 300, worked.get() + refused.get());
        eventually(() -> {
            System.gc();
            return Pagoda.liveObjects() == 0;
        }, () -> Pagoda.liveObjects() + " objects are left");
    }

    /** What a model says of itself is right, or it says that it was closed. */
    @Test
    void closeWhatOthersAskAbout() throws Exception {
        AtomicReference<Model> shared = new AtomicReference<>(Model.open(HELLO));
        String right = about(shared.get());
        AtomicBoolean over = new AtomicBoolean();
        AtomicInteger refused = new AtomicInteger();
        everyone(1, (thread, round) -> {
            if (thread == 0) {
                try {
                    for (int i = 0; i < 500; i++) {
                        shared.getAndSet(Model.open(HELLO)).close();
                    }
                } finally {
                    over.set(true);
                }
            }
            while (!over.get()) {
                Model mine = shared.get();
                try {
                    assertEquals(right, about(mine));
                } catch (PagodaException error) {
                    assertEquals(Status.INVALID_HANDLE, error.status());
                    refused.incrementAndGet();
                }
            }
        });
        shared.get().close();
        assertTrue(refused.get() > 0);
    }

    private static String about(Model model) {
        return model.provider() + model.providerReason() + model.inputs() + model.outputs();
    }
}
