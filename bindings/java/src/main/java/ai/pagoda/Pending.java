package ai.pagoda;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;
import java.util.concurrent.locks.LockSupport;
import java.util.function.Consumer;

/**
 * What is under way on a thread of Pagoda's. To complete it before that, as a cancel does, stops the run. It is
 * completed on a thread of Java's, since what a program hangs on a future would hold up other runs on Pagoda's.
 */
abstract class Pending<T> extends CompletableFuture<T> {
    /** Grows as it must, since what hangs on a future may wait for another one. */
    private static final Executor COMPLETING = Executors.newCachedThreadPool(task -> {
        Thread thread = new Thread(task, "pagoda-completing");
        thread.setDaemon(true);
        return thread;
    });

    /** How long to wait until there may be memory again: each try may have Java look for some, which takes time. */
    private static final long PAUSE_NANOS = 10_000_000;

    /** Made while there is memory. */
    private static final OutOfMemoryError NO_MEMORY =
            new OutOfMemoryError("no memory to tell how a call of Pagoda has ended");

    /** Whether the thread runs that tells of what Pagoda's threads could not. */
    private static boolean telling;

    /** Stops the run; freed with it. */
    private final Cancel own = new Cancel();
    private final Cancel given;
    private volatile boolean ended;

    /** With a cancel of the caller's the run is stopped by that alone; pagoda.h takes one. */
    Pending(Cancel given) {
        this.given = given;
        whenComplete((value, error) -> stop());
    }

    /** The handle for pagoda.h. */
    final long cancelHandle() {
        return (given == null ? own : given).handle();
    }

    /** Starts it: what is wrong at once is thrown at once. */
    final Pending<T> start(Runnable call) {
        try {
            beginTelling();
            call.run();
            return this;
        } catch (Throwable error) {
            own.close();
            throw error;
        }
    }

    /** Before anything is under way: when there is no memory, it is too late to start a thread. */
    private static synchronized void beginTelling() {
        if (!telling) {
            Thread thread = new Thread(null, () -> {
                for (;;) {
                    tellOne();
                }
            }, "pagoda-telling", 0, false);
            // It stays for good, and keeps nothing of the thread that starts it.
            thread.setContextClassLoader(Pending.class.getClassLoader());
            thread.setDaemon(true);
            thread.start();
            telling = true;
        }
    }

    private static void tellOne() {
        Pending<?> untold;
        while ((untold = Native.untold()) == null) {
            LockSupport.parkNanos(PAUSE_NANOS);
        }
        while (!untold.noMemory()) {
            LockSupport.parkNanos(PAUSE_NANOS);
        }
    }

    /** The run has ended, but there was no memory to say how. Returns false if there is not even enough for that. */
    private boolean noMemory() {
        try {
            ended(NO_MEMORY, null, null);
            return true;
        } catch (Throwable failure) {
            return isDone();
        }
    }

    /** Whatever completed this before the run has ended: a cancel, a timeout, or a value from elsewhere. */
    final void stop() {
        if (!ended) {
            try {
                own.trigger();
            } catch (PagodaException closed) {
                // The run has just ended by itself.
            }
        }
    }

    /** What hangs on this one is a plain future: to cancel that cancels no run. */
    @Override
    public final <U> CompletableFuture<U> newIncompleteFuture() {
        return new CompletableFuture<>();
    }

    /** From the callback. A value that is not wanted any more, since the future was cancelled, goes to `unwanted`. */
    final void ended(Throwable error, T value, Consumer<T> unwanted) {
        ended = true;
        own.close();
        Runnable complete = () -> {
            if (error != null) {
                fail(error);
            } else if (!complete(value)) {
                unwanted.accept(value);
            }
        };
        execute(complete);
    }

    /** Runs it on a thread of the binding's own; if there can be none, on this one. */
    static void execute(Runnable task) {
        try {
            COMPLETING.execute(task);
        } catch (Throwable noThread) {
            task.run();
        }
    }

    /** Takes memory too. The waiting thread must be told, and only this does it: so it repeats until there is some. */
    private void fail(Throwable error) {
        for (;;) {
            try {
                completeExceptionally(error);
                return;
            } catch (OutOfMemoryError none) {
                LockSupport.parkNanos(PAUSE_NANOS);
            }
        }
    }

    /** The run has ended, but there was no memory for what it made: the waiting thread must be told all the same. */
    final void failed(Throwable failure) {
        ended = true;
        completeExceptionally(failure);
        own.close();
    }
}
