package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class KvTest extends Support {
    private static KvOptions shape() {
        return new KvOptions().layers(2).heads(2).headSize(32).pageSize(8).size(KvSize.pages(16));
    }

    private static int[] ints(Tensor tensor) {
        try (tensor) {
            return tensor.ints();
        }
    }

    @Test
    void stores(@TempDir Path folder) {
        StoreOptions options = new StoreOptions().durability(Durability.NONE).maxBytes(1 << 30).segmentBytes(1 << 20)
                .queueBytes(1 << 24).garbageBytes(1 << 20);
        try (Store store = Store.open(folder, options)) {
            fails(Status.BUSY, "path", () -> Store.open(folder));
            store.flush();
            store.compact();
            assertEquals(0, store.stats().owners());
            assertEquals(0, store.stats().writeErrors());
        }
        // A cache keeps it open.
        Store store = Store.open(folder, options);
        try (KvCache cache = KvCache.open(shape().store(store))) {
            store.close();
            fails(Status.INVALID_HANDLE, "", () -> KvCache.open(shape().store(store)));
            fails(Status.INVALID_HANDLE, "", store::flush);
            fails(Status.BUSY, "path", () -> Store.open(folder));
            cache.flush();
        }
        Store.open(folder).close();
        fails(Status.INVALID_ARGUMENT, "path", () -> Store.open(Path.of("")));
        assertThrows(NullPointerException.class, () -> Store.open(null));
        assertThrows(NullPointerException.class, () -> Store.open(folder, null));
        assertThrows(IllegalArgumentException.class, () -> new StoreOptions().maxBytes(-1));
        assertThrows(IllegalArgumentException.class, () -> new StoreOptions().garbageBytes(-1));
    }

    @Test
    void leases(@TempDir Path folder) {
        KvOptions options = shape().overlap(Overlap.TRIM).edited(Edited.REFUSE).offload(Offload.AT_COMMIT)
                .modelVersion("one");
        try (Store store = Store.open(folder); KvCache cache = KvCache.open(options.store(store))) {
            try (KvLease lease = cache.prepare(new KvRequest(1, 0, 3, 2, 5, 6, 7), new KvRequest(2, 0, 0, 1))) {
                assertArrayEquals(new int[] {0, 5, 6}, ints(lease.rowOffsets()));
                assertArrayEquals(new int[] {2, 1}, ints(lease.numCandidates()));
                assertArrayEquals(new int[] {0, 0}, ints(lease.cachedLen()));
                assertArrayEquals(new int[] {0, 1, 1}, ints(lease.pageIndptr()));
                assertEquals(1, ints(lease.pageIds()).length);
                assertTrue(lease.ready(1));
                lease.await();
                lease.await(1);
                fails(Status.INVALID_ARGUMENT, "layer", () -> lease.await(2));
                fails(Status.BUSY, "", () -> cache.prepare(new KvRequest(1, 0, 3, 0, 5, 6, 7)));
                lease.commit(true);
                fails(Status.INVALID_ARGUMENT, "lease", lease::commit);
                fails(Status.INVALID_ARGUMENT, "lease", lease::abort);
            }
            assertEquals(1, store.stats().owners());
            KvLease second = cache.prepare(new KvRequest(1, 2, 2, 0, 5, 6, 7, 8));
            try (second) {
                assertEquals(new LeasedOwner(1, 0, 3, 1, 1), second.owner(0));
                fails(Status.INVALID_ARGUMENT, "index", () -> second.owner(1));
                assertThrows(IllegalArgumentException.class, () -> second.owner(-1));
                second.abort();
            }
            fails(Status.INVALID_HANDLE, "", second::commit);
            fails(Status.INVALID_HANDLE, "", second::pageIds);
            assertEquals(List.of(new CachedOwner(0, 3, Tier.RESIDENT)), cache.lookup(1));
            fails(Status.INVALID_ARGUMENT, "requests[1].start",
                    () -> cache.prepare(new KvRequest(2, 0, 0, 1), new KvRequest(1, 9, 0, 1)));
            fails(Status.INVALID_ARGUMENT, "layer", () -> cache.pool(2));
            assertThrows(NullPointerException.class, () -> cache.prepare((KvRequest) null));
            assertThrows(NullPointerException.class, () -> cache.prepare(new KvRequest(1, 0, 0, 1, (long[]) null)));
            try (Tensor pool = cache.pool(1)) {
                assertArrayEquals(new long[] {16, 2, 8, 2, 32}, pool.dims());
            }

            cache.flush();
            assertEquals(0, cache.offloadAll() + cache.offload(1, 2) + cache.offload() + cache.evict(Tiers.ALL));
            assertEquals(1, cache.evict(Tiers.RESIDENT, 1, 2));
            assertEquals(16, cache.stats().freePages());
            assertEquals(Tier.STORE, cache.lookup(1, 2).get(0).tier());
            assertEquals(Tier.NONE, cache.lookup(1, 2).get(1).tier());
            assertEquals(1, cache.prefetch(1, 2));
            try (KvLease lease = cache.prepare(new KvRequest(1, 3, 0, 1))) {
                lease.await();
            }
            assertEquals(Tier.RESIDENT, cache.lookup(1).get(0).tier());
            assertEquals(1, cache.evictAll(Tiers.ALL));
            assertEquals(Tier.NONE, cache.lookup(1).get(0).tier());
            assertTrue(cache.lookup().isEmpty());
        }
    }

    /** Pages of a prompt that other owners begin with. */
    @Test
    void forks() {
        try (KvCache cache = KvCache.open(shape())) {
            try (KvLease lease = cache.prepare(new KvRequest(1, 0, 20, 0))) {
                lease.commit();
            }
            assertEquals(16, cache.fork(1, 2, 20));
            assertEquals(8, cache.fork(1, 3, 9));
            assertEquals(0, cache.fork(1, 4, 7) + cache.fork(5, 6, 8));
            assertEquals(List.of(16L, 8L, 0L), cache.lookup(2, 3, 4).stream().map(CachedOwner::length).toList());
            KvStats stats = cache.stats();
            assertEquals(List.of(2L, 13L, 3L),
                    List.of(stats.sharedPages(), stats.freePages(), stats.residentOwners()));
            fails(Status.INVALID_ARGUMENT, "to", () -> cache.fork(1, 2, 8));
            fails(Status.INVALID_ARGUMENT, "tokens", () -> cache.fork(1, 7, -1));
            assertEquals(3, cache.evictAll(Tiers.ALL));
            assertEquals(16, cache.stats().freePages());
        }
    }

    @Test
    void misuseIsAnException() {
        fails(Status.INVALID_ARGUMENT, "options.size", () -> KvCache.open(shape().size(KvSize.NONE)));
        fails(Status.INVALID_ARGUMENT, "options.type", () -> KvCache.open(shape().type(ElementType.I64)));
        assertThrows(NullPointerException.class, () -> KvCache.open(null));
        assertThrows(IllegalArgumentException.class, () -> KvSize.bytes(-1));
        KvCache cache = KvCache.open(shape().onloadInBackground(true).onloadThreads(1).aheadPercent(0).maxHistory(64));
        fails(Status.UNSUPPORTED, "", cache::offloadAll);
        assertThrows(NullPointerException.class, () -> cache.offload((long[]) null));
        assertThrows(NullPointerException.class, () -> cache.evict(null, 1));
        assertThrows(NullPointerException.class, () -> cache.lookup((long[]) null));
        cache.close();
        fails(Status.INVALID_HANDLE, "", cache::stats);
        fails(Status.INVALID_HANDLE, "", () -> cache.prepare(new KvRequest(1, 0, 1, 0)));
        fails(Status.INVALID_HANDLE, "", () -> cache.pool(0));
        fails(Status.INVALID_HANDLE, "", () -> cache.fork(1, 2, 8));
        fails(Status.INVALID_HANDLE, "", () -> cache.lookup(1));
    }

    /** Each reaches its own field: what is wrong with one is said of that one. */
    @Test
    void optionsArrive(@TempDir Path folder) {
        fails(Status.INVALID_ARGUMENT, "options.layers", () -> KvCache.open(shape().layers(-1)));
        fails(Status.INVALID_ARGUMENT, "options.heads", () -> KvCache.open(shape().heads(-1)));
        fails(Status.INVALID_ARGUMENT, "options.head_size", () -> KvCache.open(shape().headSize(-1)));
        fails(Status.INVALID_ARGUMENT, "options.page_size", () -> KvCache.open(shape().pageSize(7)));
        fails(Status.INVALID_ARGUMENT, "options.size", () -> KvCache.open(shape().size(KvSize.pages(1L << 31))));
        fails(Status.INVALID_ARGUMENT, "options.size", () -> KvCache.open(shape().size(KvSize.bytes(1))));
        fails(Status.INVALID_ARGUMENT, "options.size_unit", () -> KvCache.open(shape().size(KvSize.DEFAULT)));
        fails(Status.INVALID_ARGUMENT, "options.max_history", () -> KvCache.open(shape().maxHistory(-1)));
        fails(Status.INVALID_ARGUMENT, "options.onload_threads", () -> KvCache.open(shape().onloadThreads(-1)));
        fails(Status.INVALID_ARGUMENT, "options.ahead_percent", () -> KvCache.open(shape().aheadPercent(101)));
        fails(Status.INVALID_ARGUMENT, "options.size", () -> KvCache.open(shape().size(KvSize.percent(50))));
        fails(Status.INVALID_ARGUMENT, "options.size", () -> KvCache.open(shape().size(KvSize.percent(101))));
        fails(Status.INVALID_ARGUMENT, "options.device_id", () -> KvCache.open(shape().deviceId(-2)));
        // A number that no machine has a GPU of.
        fails(Status.UNSUPPORTED, "options.device_id", () -> KvCache.open(shape().deviceId(4096)));
        KvCache.open(shape().deviceId(-1)).close();
        StoreStats plain = filled(folder.resolve("plain"), new StoreOptions());
        assertEquals(List.of(1L, 0L, 20L), List.of(plain.segments(), plain.evictedOwners(), plain.owners()));
        assertTrue(filled(folder.resolve("segments"), new StoreOptions().segmentBytes(1 << 16)).segments() > 3);
        assertTrue(filled(folder.resolve("small"), new StoreOptions().maxBytes(1 << 18)).evictedOwners() > 3);
    }

    /** A store with 20 owners, of some 32 KiB each. */
    private static StoreStats filled(Path folder, StoreOptions options) {
        try (Store store = Store.open(folder, options.durability(Durability.PROCESS));
                KvCache cache = KvCache.open(shape().size(KvSize.pages(32)).offload(Offload.AT_COMMIT).store(store))) {
            for (int user = 0; user < 20; user++) {
                try (KvLease lease = cache.prepare(new KvRequest(user, 0, 16, 0))) {
                    lease.commit(true);
                }
            }
            return store.stats();
        }
    }

    /** The pools of a cache through the model: a history in two parts scores as one in one. */
    @Test
    void ranksWithACache() {
        long[] items = {5, 6, 7, 8, 9, 42};
        try (Model model = Model.open(MODEL, cpu()); KvCache cache = KvCache.open(shape())) {
            float whole = score(model, cache, 1, 0, items);
            score(model, cache, 2, 0, 5, 6, 7, 42);
            assertEquals(whole, score(model, cache, 2, 3, 8, 9, 42), 1e-5);
            assertNotEquals(whole, score(model, cache, 3, 0, 8, 9, 42), 1e-5);
            assertEquals(3, cache.stats().residentOwners());
            assertEquals(3, cache.stats().tokensFromPool());
        }
    }

    /** The score of the last of the rows, which is a candidate; the others become part of the history. */
    private static float score(Model model, KvCache cache, long user, long start, long... rows) {
        List<Tensor> tensors = new ArrayList<>();
        try (KvLease lease = cache.prepare(new KvRequest(user, start, rows.length - 1, 1))) {
            tensors.addAll(List.of(Tensor.of(rows), lease.rowOffsets(), lease.numCandidates(), lease.cachedLen(),
                    lease.pageIndptr(), lease.pageIds(), cache.pool(0), cache.pool(1)));
            Map<String, Tensor> inputs = Map.of("item_ids", tensors.get(0), "row_offsets", tensors.get(1),
                    "num_candidates", tensors.get(2), "cached_len", tensors.get(3), "page_indptr", tensors.get(4),
                    "page_ids", tensors.get(5), "kv_pool_0", tensors.get(6), "kv_pool_1", tensors.get(7));
            Map<String, Tensor> pools = Map.of("kv_pool_0_out", tensors.get(6), "kv_pool_1_out", tensors.get(7));
            try (Outputs outputs = model.run(inputs, List.of("scores"), pools, null)) {
                lease.commit();
                return outputs.get("scores").floats()[rows.length - 1];
            }
        } finally {
            tensors.forEach(Tensor::close);
        }
    }
}
