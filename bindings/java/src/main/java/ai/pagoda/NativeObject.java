package ai.pagoda;

import java.lang.ref.Cleaner;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.LongConsumer;

/**
 * Something of pagoda.h that is closed once. Native methods are instance methods, so that the object can be reached,
 * and is not cleaned up, while one runs. A thread that closes it meanwhile does no harm: pagoda.h checks every handle,
 * and keeps what a call uses until it returns. But what it returns by pointer goes with the handle: that is read in the
 * constructor, before another thread can close it, or, as the memory of a tensor, while a {@code Tensor.Hold} keeps it.
 */
abstract class NativeObject implements AutoCloseable {
    static final Cleaner CLEANER = Cleaner.create();
    /** On a thread of its own: what has a store or threads may take long to free, and would keep others' memory. */
    private static final Cleaner SLOW = Cleaner.create();
    private static final System.Logger LOGGER = System.getLogger("ai.pagoda");

    private final Owned owned;
    private final Cleaner.Cleanable cleanable;

    NativeObject(long handle, LongConsumer free) {
        owned = new Owned(handle, free, getClass().getSimpleName());
        boolean quick = this instanceof Tensor || this instanceof Cancel;
        cleanable = (quick ? CLEANER : SLOW).register(this, owned);
    }

    /** The handle, if this is not closed: 0 would mean "none" to pagoda.h. */
    final long handle() {
        long handle = owned.handle.get();
        if (handle == 0) {
            throw closed();
        }
        return handle;
    }

    final PagodaException closed() {
        return new PagodaException(Status.INVALID_HANDLE, owned.name + " was closed: open another one", "");
    }

    /** Closes this. Doing so again does nothing. */
    @Override
    public void close() {
        owned.free();
        cleanable.clean();
    }

    /** The handle apart from its object, so that it can be freed when that is gone. */
    private static final class Owned implements Runnable {
        private final AtomicLong handle;
        private final LongConsumer free;
        private final String name;

        Owned(long handle, LongConsumer free, String name) {
            this.handle = new AtomicLong(handle);
            this.free = free;
            this.name = name;
        }

        boolean free() {
            long mine = handle.getAndSet(0);
            if (mine != 0) {
                free.accept(mine);
            }
            return mine != 0;
        }

        /** By the cleaner; after a close there is nothing left to do. */
        @Override
        public void run() {
            if (free()) {
                LOGGER.log(System.Logger.Level.WARNING, "{0} was not closed: use try-with-resources", name);
            }
        }
    }
}
