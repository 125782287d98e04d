package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class EngineTest extends Support {
    private static EngineOptions options() {
        return new EngineOptions().model(cpu()).kvSize(KvSize.pages(64));
    }

    /** A user of tests/data/engine, with the scores of the float64 oracle after some of its events. */
    @SuppressWarnings("unchecked")
    record User(Map<String, Object> about) {
        static List<User> of(String name) throws IOException {
            List<Object> all = (List<Object>) Json.read(Files.readString(FOLDERS.resolve(name + ".json")));
            return all.stream().map(one -> new User((Map<String, Object>) one)).toList();
        }

        static long[] longs(Object list, int from, int to) {
            return ((List<Double>) list).subList(from, to).stream().mapToLong(Double::longValue).toArray();
        }

        RankRequest request(long user, int from, int to) {
            RankRequest request = new RankRequest(user).time(((Double) about.get("now")).longValue());
            ((Map<String, Object>) about.get("events")).forEach(
                    (name, keys) -> request.events(name, longs(keys, from, to)));
            request.eventTimes(longs(about.get("times"), from, to));
            ((Map<String, Object>) about.get("keys")).forEach(
                    (name, key) -> request.userKey(name, ((Double) key).longValue()));
            ((Map<String, Object>) about.get("candidates")).forEach(
                    (name, keys) -> request.candidates(name, longs(keys, 0, ((List<?>) keys).size())));
            return from == 0 ? request : request.start(from);
        }

        List<Map<String, Object>> steps() {
            return (List<Map<String, Object>>) about.get("steps");
        }

        static int events(Map<String, Object> step) {
            return ((Double) step.get("events")).intValue();
        }

        static void right(Map<String, Object> step, RankResponse ranked) {
            List<Double> expected = (List<Double>) step.get("scores");
            assertEquals(expected.size(), ranked.scores().length);
            for (int i = 0; i < expected.size(); i++) {
                assertEquals(expected.get(i), ranked.scores()[i], 2e-5 * Math.max(1, Math.abs(expected.get(i))));
            }
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"gather", "bag", "keyed", "uncached"})
    void scoresAreTheOracles(String name) throws Exception {
        try (Engine engine = Engine.open(FOLDERS.resolve(name), options())) {
            int user = 0;
            for (User one : User.of(name)) {
                int sent = 0;
                for (Map<String, Object> step : one.steps()) {
                    int events = User.events(step);
                    // Only what is new, the second time on.
                    User.right(step, engine.rank(one.request(user, sent, events)));
                    User.right(step, engine.rankAsync(one.request(user, 0, events)).get(20, TimeUnit.SECONDS));
                    sent = events;
                }
                user++;
            }
            EngineStats stats = engine.stats();
            assertEquals(0, stats.failed());
            assertTrue(stats.answered() > 40 && (name.equals("uncached") || stats.cachedRows() > stats.computedRows()));
        }
    }

    @Test
    void remembers() throws Exception {
        User user = User.of("gather").get(0);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options())) {
            RankResponse first = engine.rank(user.request(7, 0, 20));
            assertEquals(0, first.cachedRows());
            assertEquals(42, first.computedRows());
            RankResponse second = engine.rank(user.request(7, 20, 23));
            assertEquals(42, second.cachedRows());
            assertEquals(6, second.computedRows());
            assertEquals(0, second.batchedWith());
            assertTrue(second.runTime().toNanos() > 0 && second.queueTime().toNanos() >= 0);
            assertEquals(5, second.size());
            assertEquals(2, second.tasks());
            assertArrayEquals(new float[] {second.score(4, 0), second.score(4, 1)}, second.candidate(4));
            assertThrows(IndexOutOfBoundsException.class, () -> second.score(5, 0));
            assertThrows(IndexOutOfBoundsException.class, () -> second.score(0, 2));
            assertEquals(1, engine.forget(7, 8));
            fails(Status.NOT_FOUND, "request.start", () -> engine.rank(user.request(7, 20, 23)));
        }
    }

    @Test
    void swaps() throws Exception {
        User user = User.of("gather").get(1);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options())) {
            assertEquals(2, engine.tasks());
            String info = engine.info();
            assertTrue(info.contains("\"tasks\""), info);
            RankResponse before = engine.rank(user.request(1, 0, 9));
            assertEquals(64, before.version().length());
            assertTrue(info.contains(before.version()), info);
            assertEquals(before.version(), engine.rankAsync(user.request(1, 0, 9)).get().version());
            engine.swap(FOLDERS.resolve("second"));
            assertNotEquals(info, engine.info());
            RankResponse after = engine.rank(user.request(1, 0, 9));
            assertTrue(!Arrays.equals(before.scores(), after.scores()));
            assertTrue(engine.info().contains(after.version()));
            User.right(User.of("second").get(1).steps().get(4), after);
            fails(Status.NOT_FOUND, "folder", () -> engine.swap(Path.of("/nowhere")));
            assertThrows(NullPointerException.class, () -> engine.swap(null));
        }
    }

    @Test
    void keepsWhatItKnowsInAStore(@TempDir Path folder) throws Exception {
        User user = User.of("gather").get(0);
        EngineOptions options = options().storePath(folder.resolve("store"))
                .storeOptions(new StoreOptions().durability(Durability.PROCESS)).offload(Offload.AT_COMMIT).aheadPercent(0);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options)) {
            engine.rank(user.request(7, 0, 20));
            fails(Status.BUSY, "", () -> Engine.open(FOLDERS.resolve("gather"), options));
        }
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options)) {
            assertTrue(engine.rank(user.request(7, 0, 23)).cachedRows() > 0);
        }
    }

    /** A pool with room for two of them: by the time that one comes back, the others have had its pages. */
    @ParameterizedTest
    @ValueSource(longs = {1 << 20, 0})
    void whatLeftThePoolComesBackFromHostMemory(long hostBytes) throws Exception {
        User user = User.of("gather").get(0);
        Map<String, Object> last = user.steps().get(user.steps().size() - 1);
        EngineOptions options = options().kvSize(KvSize.pages(14)).hostBytes(hostBytes).rememberBytes(0)
                .cudaGraphs(new GraphShape(1, 384), new GraphShape(8, 3072, 2048, 0));
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options)) {
            for (boolean came : new boolean[] {false, true}) {
                for (int number = 1; number <= 6; number++) {
                    RankResponse ranked = engine.rank(user.request(number, 0, User.events(last)));
                    assertEquals(came && hostBytes > 0, ranked.cachedRows() > 0, "user " + number);
                    User.right(last, ranked);
                }
            }
        }
    }

    @Test
    void optionsArrive() {
        Path folder = FOLDERS.resolve("gather");
        fails(Status.INVALID_ARGUMENT, "options.instances", () -> Engine.open(folder, options().instances(300)));
        fails(Status.INVALID_ARGUMENT, "options.max_batch", () -> Engine.open(folder, options().maxBatch(-1)));
        fails(Status.INVALID_ARGUMENT, "options.max_batch_rows", () -> Engine.open(folder, options().maxBatchRows(-1)));
        fails(Status.INVALID_ARGUMENT, "options.queue", () -> Engine.open(folder, options().queue(-1)));
        fails(Status.INVALID_ARGUMENT, "options.ahead_percent", () -> Engine.open(folder, options().aheadPercent(101)));
        fails(Status.INVALID_ARGUMENT, "options.model.device_id",
                () -> Engine.open(folder, options().model(cpu().deviceId(-1))));
        fails(Status.INVALID_ARGUMENT, "options.cuda_graphs[1]",
                () -> Engine.open(folder, options().cudaGraphs(new GraphShape(1, 1), new GraphShape(1, 0))));
        for (KvSize size : List.of(KvSize.percent(50), KvSize.percent(101), KvSize.pages(1L << 31),
                new KvSize(KvSizeUnit.DEFAULT, 1))) {
            fails(Status.INVALID_ARGUMENT, "options.kv_size", () -> Engine.open(folder, options().kvSize(size)));
        }
        fails(Status.NOT_FOUND, "options.table_tiers_path",
                () -> Engine.open(folder, options().tableTiersPath(Path.of("/nowhere/ps.json"))));
        fails(Status.CAPACITY, "options.host_bytes", () -> Engine.open(folder, options().hostBytes(Long.MAX_VALUE)));
        assertThrows(IllegalArgumentException.class, () -> options().hostBytes(-1));
        assertThrows(NullPointerException.class, () -> options().cudaGraphs((GraphShape) null));
        assertThrows(IllegalArgumentException.class, () -> KvSize.bytes(-1));
        assertThrows(IllegalArgumentException.class, () -> options().maxDelay(Duration.ofSeconds(-1)));
        try (Engine engine = Engine.open(folder,
                options().kvSize(KvSize.NONE).rememberBytes(0).tableCacheBytes(1 << 20))) {
            assertEquals(0, engine.stats().rememberedUsers());
            assertEquals(0, engine.kvStats().pages());
        }
    }

    /** Of 2 layers of a head of 8 f32: 32 bytes, and 12 as int8. */
    @ParameterizedTest
    @CsvSource({"DEFAULT, 32", "INT8, 12"})
    void quantisedPagesOfSoManyBytesAreMore(KvFormat format, long head) throws Exception {
        EngineOptions options = options().kvSize(KvSize.bytes(1 << 20)).kvFormat(format);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options)) {
            assertEquals((1 << 20) / (2 * 2 * 8 * head), engine.kvStats().pages());
        }
    }

    @Test
    void saysWhatItRunsOnAndHas() throws Exception {
        User user = User.of("gather").get(1);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options().hostBytes(1 << 20))) {
            assertEquals(new EngineProvider(Provider.CPU, -1, ""), engine.provider());
            engine.rank(user.request(7, 0, 9));
            assertEquals(1, engine.kvStats().residentOwners());
            assertEquals(1, engine.unload(7, 8));
            assertEquals(0, engine.kvStats().residentOwners());
            assertEquals(1, engine.prefetch(7, 8));
            assertTrue(engine.rank(user.request(7, 0, 9)).cachedRows() > 0);
            assertEquals(List.of(), engine.tables());
            engine.swap(FOLDERS.resolve("bag"));
            assertTrue(engine.tables().contains("items"), engine.tables().toString());
            assertEquals(40, engine.tableStats("items").cachedRows());
            fails(Status.NOT_FOUND, "table", () -> engine.tableStats("nothing"));
        }
    }

    /** At the worst moment: between the number of tasks and the request. */
    @Test
    void swapsRightAfterTheNumberOfTasksWasRead() throws Exception {
        User user = User.of("gather").get(1);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options())) {
            for (String folder : List.of("three", "gather", "three", "second")) {
                AtomicInteger reads = new AtomicInteger();
                RankResponse response = engine.rank(user.request(1, 0, 9), () -> {
                    int tasks = engine.tasks();
                    if (reads.incrementAndGet() == 1) {
                        engine.swap(FOLDERS.resolve(folder));
                    }
                    return tasks;
                });
                assertEquals(2, reads.get());
                assertEquals(engine.tasks(), response.tasks());
                assertEquals(response.size() * response.tasks(), response.scores().length);
            }
        }
    }

    /** Between a model of two tasks and one of three while threads rank: every answer is a whole one of either. */
    @Test
    void swapsThatChangeTheTasksFailNoRequest() throws Exception {
        User user = User.of("gather").get(1);
        AtomicBoolean stop = new AtomicBoolean();
        AtomicLong[] answered = {new AtomicLong(), new AtomicLong()};
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options())) {
            List<CompletableFuture<Void>> threads = new ArrayList<>();
            for (int number = 1; number <= 3; number++) {
                int mine = number;
                threads.add(CompletableFuture.runAsync(() -> {
                    for (int round = 0; !stop.get(); round++) {
                        RankRequest request = user.request(mine, 0, 9);
                        RankResponse response =
                                round % 4 == 0 ? engine.rankAsync(request).join() : engine.rank(request);
                        assertEquals(response.scores().length, response.size() * response.tasks());
                        answered[response.tasks() - 2].incrementAndGet();
                    }
                }, task -> new Thread(task).start()));
            }
            for (int round = 0; round < 10; round++) {
                for (int tasks = 0; tasks < 2; tasks++) {
                    AtomicLong count = answered[tasks];
                    long before = count.get();
                    eventually(() -> count.get() > before + 5, () -> "no answers: " + threads);
                    engine.swap(FOLDERS.resolve(tasks == 0 ? "three" : "gather"));
                }
            }
            stop.set(true);
            for (CompletableFuture<Void> thread : threads) {
                thread.get(60, TimeUnit.SECONDS);
            }
        } finally {
            stop.set(true);
        }
    }

    @Test
    void endsEarly() throws Exception {
        User user = User.of("gather").get(1);
        // A request waits for others, and none arrive.
        EngineOptions slow = options().maxDelay(Duration.ofSeconds(60));
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), slow); Cancel cancel = new Cancel()) {
            fails(Status.CANCELLED, "request.timeout_us",
                    () -> engine.rank(user.request(1, 0, 9).timeout(Duration.ofMillis(20))));
            CompletableFuture<RankResponse> timed =
                    engine.rankAsync(user.request(1, 0, 9).timeout(Duration.ofMillis(20)));
            assertEquals(Status.CANCELLED, status(assertThrows(ExecutionException.class, timed::get)));

            CompletableFuture<RankResponse> future = engine.rankAsync(user.request(1, 0, 9));
            CompletableFuture<Integer> dependent = future.thenApply(RankResponse::size);
            assertTrue(!future.isDone());
            assertTrue(future.cancel(true));
            assertTrue(future.isCancelled());
            assertThrows(CompletionException.class, dependent::join);
            // The request itself has ended too.
            eventually(() -> engine.stats().failed() == 3, () -> engine.stats().toString());
            CompletableFuture<RankResponse> late = engine.rankAsync(user.request(1, 0, 9));
            late.orTimeout(20, TimeUnit.MILLISECONDS);
            Throwable cause = assertThrows(ExecutionException.class, late::get).getCause();
            assertEquals(TimeoutException.class, cause.getClass());
            eventually(() -> engine.stats().failed() == 4, () -> engine.stats().toString());

            CompletableFuture<RankResponse> shared = engine.rankAsync(user.request(1, 0, 9).cancel(cancel));
            cancel.trigger();
            assertEquals(Status.CANCELLED, status(assertThrows(ExecutionException.class, shared::get)));
            fails(Status.CANCELLED, "", () -> engine.rank(user.request(1, 0, 9).cancel(cancel)));
        }
    }

    /** What C is told of is there, whatever another thread does to the request meanwhile. */
    @Test
    void aRequestThatChangesIsPackedWhole() throws Exception {
        AtomicReference<RankRequest> shared = new AtomicReference<>(new RankRequest(1));
        AtomicBoolean over = new AtomicBoolean();
        Thread changing = new Thread(() -> {
            while (!over.get()) {
                RankRequest request = new RankRequest(1);
                shared.set(request);
                for (int i = 0; i < 50; i++) {
                    request.events("e" + i, 1, 2).userKey("u" + i, 3).candidates("c" + i, 4, 5, 6);
                }
                request.eventTimes(7, 8);
            }
        });
        changing.start();
        try {
            long end = System.nanoTime() + 1_000_000_000L;
            while (System.nanoTime() < end) {
                RankRequest.Packed packed;
                try {
                    packed = shared.get().pack();
                } catch (PagodaException error) {
                    // Times, and no events yet.
                    assertEquals("request.event_times", error.argument());
                    continue;
                }
                long[] n = packed.numbers;
                long keys = n[3] * n[2] + n[4] * n[2] + n[5] + n[7] * n[6];
                assertEquals(RankRequest.Packed.HEAD + keys, n.length, () -> Arrays.toString(n));
                int names = 0;
                for (byte letter : packed.names) {
                    names += letter == 0 ? 1 : 0;
                }
                assertEquals(n[3] + n[5] + n[7], names);
            }
        } finally {
            over.set(true);
            changing.join();
        }
    }

    /** Three hundred years are more than there are nanoseconds in a long. */
    @Test
    void longTimesAreCutShort() throws Exception {
        User user = User.of("gather").get(1);
        try (Engine engine = Engine.open(FOLDERS.resolve("gather"), options())) {
            for (Duration timeout : List.of(Duration.ofDays(365 * 300), Duration.ofSeconds(Long.MAX_VALUE))) {
                assertEquals(3, engine.rank(user.request(1, 0, 9).timeout(timeout)).size());
            }
        }
        Duration longest = Duration.ofSeconds(Long.MAX_VALUE / 1_000_000 - 1, 999_999_999);
        assertEquals(Long.MAX_VALUE / 1_000_000 * 1_000_000 - 1, Native.micros(longest, "timeout"));
        assertEquals(Long.MAX_VALUE, Native.micros(longest.plusNanos(1), "timeout"));
        assertEquals(1, Native.micros(Duration.ofNanos(1999), "timeout"));
        options().maxDelay(Duration.ofDays(365 * 300));
        Miss.within(Duration.ofDays(365 * 300));
        assertThrows(IllegalArgumentException.class, () -> new RankRequest(1).timeout(Duration.ofNanos(-1)));
    }

    private static Status status(ExecutionException error) {
        return ((PagodaException) error.getCause()).status();
    }

    @Test
    void misuseIsAnException() throws Exception {
        User user = User.of("gather").get(1);
        fails(Status.NOT_FOUND, "folder", () -> Engine.open(Path.of("/nowhere")));
        assertThrows(NullPointerException.class, () -> Engine.open(null));
        assertThrows(NullPointerException.class, () -> Engine.open(FOLDERS.resolve("gather"), null));
        Engine engine = Engine.open(FOLDERS.resolve("gather"), options());
        fails(Status.INVALID_ARGUMENT, "request.candidate_keys", () -> engine.rank(new RankRequest(1)));
        fails(Status.INVALID_ARGUMENT, "request.event_keys",
                () -> engine.rank(user.request(1, 0, 9).events("rating", 1, 2)));
        fails(Status.INVALID_ARGUMENT, "request.event_times",
                () -> engine.rank(user.request(1, 0, 9).eventTimes(1, 2)));
        fails(Status.INVALID_ARGUMENT, "request.candidate_keys",
                () -> engine.rankAsync(user.request(1, 0, 9).candidates("item", 1)));
        fails(Status.NOT_FOUND, "request.candidate_keys",
                () -> engine.rankAsync(user.request(1, 0, 9).candidates("colour", 1, 2, 3)));
        assertThrows(IllegalArgumentException.class, () -> new RankRequest(1).start(-1));
        assertThrows(IllegalArgumentException.class,
                () -> engine.rank(user.request(1, 0, 9).candidates("a\0", 1, 2, 3)));
        assertThrows(NullPointerException.class, () -> engine.rank(null));
        assertThrows(NullPointerException.class, () -> engine.rankAsync(null));
        assertThrows(NullPointerException.class, () -> new RankRequest(1).events(null, 1));
        assertThrows(NullPointerException.class, () -> new RankRequest(1).events("item", (long[]) null));
        assertThrows(NullPointerException.class, () -> engine.forget((long[]) null));
        Cancel closed = new Cancel();
        closed.close();
        fails(Status.INVALID_HANDLE, "", closed::trigger);
        fails(Status.INVALID_HANDLE, "", () -> engine.rank(user.request(1, 0, 9).cancel(closed)));
        fails(Status.INVALID_HANDLE, "", () -> engine.rankAsync(user.request(1, 0, 9).cancel(closed)));
        engine.close();
        engine.close();
        fails(Status.INVALID_HANDLE, "", () -> engine.rank(user.request(1, 0, 9)));
        fails(Status.INVALID_HANDLE, "", () -> engine.rankAsync(user.request(1, 0, 9)));
        fails(Status.INVALID_HANDLE, "", engine::info);
        fails(Status.INVALID_HANDLE, "", engine::stats);
        fails(Status.INVALID_HANDLE, "", () -> engine.forget(1));
        fails(Status.INVALID_HANDLE, "", () -> engine.swap(FOLDERS.resolve("gather")));
    }

    /** What the program hangs on a future may close the engine. */
    @Test
    void closesInADependent() throws Exception {
        Engine engine = Engine.open(FOLDERS.resolve("gather"), options());
        engine.rankAsync(User.of("gather").get(1).request(1, 0, 9)).thenRun(engine::close).get(20, TimeUnit.SECONDS);
        fails(Status.INVALID_HANDLE, "", engine::tasks);
    }
}
