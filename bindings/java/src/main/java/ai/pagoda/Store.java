package ai.pagoda;

import java.nio.file.Path;
import java.util.Objects;

/**
 * A store: histories in the files of a folder, which survive restarts and crashes. What is damaged there counts as not
 * stored; it never comes back wrong. One process at a time has a store open; in it, any number of caches may share one.
 */
public final class Store extends NativeObject {
    static {
        Native.load();
    }

    private Store(long handle) {
        super(handle, Store::free);
    }

    /**
     * Opens the store in a folder, or makes one there if the folder is empty or missing, with the default options.
     *
     * @param folder the folder
     * @return the store
     */
    public static Store open(Path folder) {
        return open(folder, new StoreOptions());
    }

    /**
     * Opens the store in a folder, or makes one there if the folder is empty or missing.
     *
     * @param folder the folder
     * @param options how
     * @return the store
     */
    public static Store open(Path folder, StoreOptions options) {
        byte[] text = Native.text(Objects.requireNonNull(folder, "folder").toString(), "folder");
        return new Store(open(text, Objects.requireNonNull(options, "options").numbers()));
    }

    /** Waits until everything that was handed to the store is as durable as it promises. */
    public void flush() {
        flush(handle());
    }

    /** Gives back the space of everything that was removed or replaced, and waits for that. */
    public void compact() {
        compact(handle());
    }

    /**
     * What the store has now, and what happened since it was opened.
     *
     * @return the numbers
     */
    public StoreStats stats() {
        return StoreStats.of(stats(handle()));
    }

    private static native long open(byte[] folder, long[] numbers);

    private native void flush(long handle);

    private native void compact(long handle);

    private native long[] stats(long handle);

    private static native void free(long handle);
}
