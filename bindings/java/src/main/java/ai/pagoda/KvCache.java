package ai.pagoda;

import java.lang.ref.Reference;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;

/**
 * A cache of keys and values: each owner's history as pages in a pool, those of owners not seen for long in a store.
 * Leases that are out stay good when it is closed.
 */
public final class KvCache extends NativeObject {
    static {
        Native.load();
    }

    private KvCache(long handle) {
        super(handle, KvCache::free);
    }

    /**
     * Opens a cache.
     *
     * @param options its shape, and how it behaves
     * @return the cache
     */
    public static KvCache open(KvOptions options) {
        try {
            return new KvCache(
                    open(Objects.requireNonNull(options, "options").numbers(), options.modelVersionText()));
        } finally {
            Reference.reachabilityFence(options);
        }
    }

    /**
     * The pool of one layer: an input and an output of the model, both bound to it. Its memory is for the model alone.
     *
     * @param layer the layer
     * @return [pages, 2, page size, heads, head size], for the caller to close
     */
    public Tensor pool(int layer) {
        return new Tensor(pool(handle(), layer));
    }

    /**
     * What is cached of each owner. By the time the answer is read, other threads may have changed it.
     *
     * @param owners the owners
     * @return what there is, in their order
     */
    public List<CachedOwner> lookup(long... owners) {
        long[] found = new long[Math.multiplyExact(3, owners.length)];
        lookup(handle(), owners, found);
        List<CachedOwner> cached = new ArrayList<>();
        for (int i = 0; i < found.length; i += 3) {
            cached.add(new CachedOwner(found[i], found[i + 1], Tier.of((int) found[i + 2])));
        }
        return cached;
    }

    /**
     * Makes room for a batch and says where everything lies. Evicts the least recently used owners if need be, and
     * brings those of the batch back from the store. Then run the model on the tensors of the lease and the pools of
     * the cache.
     *
     * @param requests what each owner brings
     * @return the lease, for the caller to close
     */
    public KvLease prepare(List<KvRequest> requests) {
        List<KvRequest> batch = List.copyOf(requests);
        long[] numbers = new long[Math.multiplyExact(5, batch.size())];
        int count = 0;
        for (KvRequest request : batch) {
            count = Math.addExact(count, request.items().length);
        }
        long[] items = new long[count];
        int at = 0;
        int place = 0;
        for (KvRequest request : batch) {
            long[] mine = request.items();
            numbers[at++] = request.owner();
            numbers[at++] = request.start();
            numbers[at++] = request.tokens();
            numbers[at++] = request.candidates();
            numbers[at++] = mine.length;
            System.arraycopy(mine, 0, items, place, mine.length);
            place += mine.length;
        }
        return new KvLease(prepare(handle(), numbers, items));
    }

    /**
     * Makes room for a batch.
     *
     * @param requests what each owner brings
     * @return the lease, for the caller to close
     */
    public KvLease prepare(KvRequest... requests) {
        return prepare(List.of(requests));
    }

    /**
     * Lets an owner begin with the first tokens of another one: a prompt that many conversations begin with, or the
     * beams of a search. Whole pages are shared. What the new owner appends goes to pages of its own. If the other one
     * is in the store, it is loaded first.
     *
     * @param from the owner that has the tokens
     * @param to the owner that begins with them; it must have no history
     * @param tokens how many of them at most
     * @return how many are shared
     */
    public int fork(long from, long to, int tokens) {
        return fork(handle(), from, to, tokens);
    }

    /**
     * Writes the histories of these owners to the store and waits until they are as durable as it promises.
     *
     * @param owners the owners
     * @return how many had something that was not stored
     */
    public long offload(long... owners) {
        return offload(handle(), Objects.requireNonNull(owners, "owners"));
    }

    /**
     * Writes the histories of all owners in the pool to the store.
     *
     * @return how many had something that was not stored
     */
    public long offloadAll() {
        return offload(handle(), null);
    }

    /**
     * Removes histories of these owners. Those that leave the pool alone go to the store first, unless that is done by
     * hand; those that leave the store are gone for good when this returns.
     *
     * @param tiers from where
     * @param owners the owners
     * @return how many had something there
     */
    public long evict(Tiers tiers, long... owners) {
        return evict(handle(), Objects.requireNonNull(owners, "owners"), Objects.requireNonNull(tiers, "tiers").number);
    }

    /**
     * Removes the histories of all owners that no lease holds.
     *
     * @param tiers from where
     * @return how many had something there
     */
    public long evictAll(Tiers tiers) {
        return evict(handle(), null, Objects.requireNonNull(tiers, "tiers").number);
    }

    /**
     * Begins to bring histories from the store into the pool and returns at once. Stops where there is no more room.
     *
     * @param owners the owners
     * @return how many histories are on their way
     */
    public long prefetch(long... owners) {
        return prefetch(handle(), Objects.requireNonNull(owners, "owners"));
    }

    /** Waits until everything that was handed to the store, if there is one, is as durable as it promises. */
    public void flush() {
        flush(handle());
    }

    /**
     * What the cache has, and what it did since it was opened.
     *
     * @return the numbers
     */
    public KvStats stats() {
        return KvStats.of(stats(handle()));
    }

    private static native long open(long[] numbers, byte[] modelVersion);

    private native long pool(long handle, int layer);

    private native void lookup(long handle, long[] owners, long[] found);

    private native long prepare(long handle, long[] numbers, long[] items);

    private native int fork(long handle, long from, long to, int tokens);

    private native long offload(long handle, long[] owners);

    private native long evict(long handle, long[] owners, int tiers);

    private native long prefetch(long handle, long[] owners);

    private native void flush(long handle);

    private native long[] stats(long handle);

    private static native void free(long handle);
}
