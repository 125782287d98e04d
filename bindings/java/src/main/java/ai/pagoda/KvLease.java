package ai.pagoda;

/**
 * A batch's hold on its owners: where their histories lie, and room for what is new. It ends with a commit or an abort;
 * one that is closed before is aborted.
 */
public final class KvLease extends NativeObject {
    static {
        Native.load();
    }

    /** Takes a handle over. */
    KvLease(long handle) {
        super(handle, KvLease::free);
    }

    /**
     * Where each owner's rows begin.
     *
     * @return i32 [owners + 1], for the caller to close, before or after the lease
     */
    public Tensor rowOffsets() {
        return new Tensor(tensor(handle(), 0));
    }

    /**
     * How many candidates each owner has.
     *
     * @return i32 [owners], for the caller to close, before or after the lease
     */
    public Tensor numCandidates() {
        return new Tensor(tensor(handle(), 1));
    }

    /**
     * How many tokens of each owner are cached.
     *
     * @return i32 [owners], for the caller to close, before or after the lease
     */
    public Tensor cachedLen() {
        return new Tensor(tensor(handle(), 2));
    }

    /**
     * Where each owner's list of pages begins.
     *
     * @return i32 [owners + 1], for the caller to close, before or after the lease
     */
    public Tensor pageIndptr() {
        return new Tensor(tensor(handle(), 3));
    }

    /**
     * Each owner's pages in order of position.
     *
     * @return i32, for the caller to close, before or after the lease
     */
    public Tensor pageIds() {
        return new Tensor(tensor(handle(), 4));
    }

    /**
     * What the lease has of one owner.
     *
     * @param index its place in the batch
     * @return what there is
     */
    public LeasedOwner owner(int index) {
        long[] n = owner(handle(), Native.unsigned(index, "index"));
        return new LeasedOwner(n[0], n[1], (int) n[2], (int) n[3], (int) n[4]);
    }

    /**
     * Whether a layer of every owner has arrived from the store. Does not wait.
     *
     * @param layer the layer
     * @return whether it has
     */
    public boolean ready(int layer) {
        return ready(handle(), layer);
    }

    /** Waits until every layer of every owner has arrived from the store. */
    public void await() {
        await(-1);
    }

    /**
     * Waits until a layer of every owner has arrived from the store.
     *
     * @param layer the layer; -1 for all
     */
    public void await(int layer) {
        await(handle(), layer);
    }

    /** Makes the new tokens part of their histories, and ends the lease. */
    public void commit() {
        commit(false);
    }

    /**
     * Makes the new tokens part of their histories, and ends the lease.
     *
     * @param wait whether to wait until what goes to the store at commit is as durable as that promises; then an
     *     exception about {@code wait} means that the tokens are committed, but the store does not have them as it
     *     should
     */
    public void commit(boolean wait) {
        commit(handle(), wait);
    }

    /** Ends the lease and leaves everything as it was before. */
    public void abort() {
        abort(handle());
    }

    private native long tensor(long handle, int which);

    private native long[] owner(long handle, long index);

    private native boolean ready(long handle, int layer);

    private native void await(long handle, int layer);

    private native void commit(long handle, boolean wait);

    private native void abort(long handle);

    private static native void free(long handle);
}
