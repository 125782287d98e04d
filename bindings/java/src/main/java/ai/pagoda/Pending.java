package ai.pagoda;

import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.Executors;
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
            Thread thread = new Thread(() -> {
                for (;;) {
                    tellOne();
                }
            }, "pagoda-telling");
            thread.setDaemon(true);
            thread.start();
            telling = true;
        }
    }

    private static void tellOne() {
        Pending<?> untold;
        while ((untold = Native.untold()) == null) {
            Thread.yield();
        }
        while (!untold.noMemory()) {
            Thread.yield();
        }
    }

    /** The run has ended, but there was no memory to say how. Returns false if there is not even enough for that. */
    private boolean noMemory() {
        try {
            ended(new OutOfMemoryError("no memory to tell how a call of Pagoda has ended"), null, unwanted -> {});
            return true;
        } catch (Throwable failure) {
            return isDone();
        }
    }

    /** Whatever completed this before the run has ended: a cancel, a timeout, or a value from elsewhere. */
    private void stop() {
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

    /** From the callback. A value that no one wants any more, since the future was cancelled, goes to `unwanted`. */
    final void ended(Throwable error, T value, Consumer<T> unwanted) {
        ended = true;
        own.close();
        Runnable complete = () -> {
            if (error != null) {
                completeExceptionally(error);
            } else if (!complete(value)) {
                unwanted.accept(value);
            }
        };
        try {
            COMPLETING.execute(complete);
        } catch (Throwable noThread) {
            complete.run();
        }
    }

    /** The run has ended, but there was no memory for what it made: whoever waits must be told all the same. */
    final void failed(Throwable failure) {
        ended = true;
        completeExceptionally(failure);
        own.close();
    }
}
