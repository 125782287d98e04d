package ai.pagoda;

import ai.pagoda.TokenStream.Generating;
import java.util.Objects;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;

/** The tokens of a request for one subscriber. */
final class TokenPublisher implements Flow.Publisher<Token> {
    private final Generating generating;

    TokenPublisher(Generating generating) {
        this.generating = generating;
    }

    @Override
    public void subscribe(Flow.Subscriber<? super Token> subscriber) {
        Reading reading = new Reading(generating, Objects.requireNonNull(subscriber, "subscriber"));
        if (!generating.listen(reading::wake)) {
            reading.taken = true;
        }
        reading.begin();
    }

    /**
     * What a subscriber has asked for, and got. All its signals come from {@link #run}, of which one at most is under way: that
     * keeps them in order, and a subscriber that asks for more from within onNext does not recurse.
     */
    private static final class Reading implements Flow.Subscription, Runnable {
        private final Generating generating;
        private final AtomicLong demand = new AtomicLong();
        /** How often {@link #wake} was called since {@link #run} last looked; not 0 while that is under way or about to be. */
        private final AtomicInteger wakes = new AtomicInteger(1);
        /** Only {@link #run} uses it, and drops it at the end. */
        private Flow.Subscriber<? super Token> subscriber;
        /** Whether another subscriber was first. */
        private boolean taken;
        private volatile boolean cancelled;
        private volatile IllegalArgumentException refused;

        Reading(Generating generating, Flow.Subscriber<? super Token> subscriber) {
            this.generating = generating;
            this.subscriber = subscriber;
        }

        /** Until onSubscribe has returned there is no other signal: {@link #wakes} is 1 until then. */
        void begin() {
            try {
                subscriber.onSubscribe(this);
            } catch (Throwable failure) {
                cancel();
                throw failure;
            } finally {
                Pending.execute(this);
            }
        }

        @Override
        public void request(long count) {
            if (count > 0) {
                demand.accumulateAndGet(count, (had, more) -> had + more < 0 ? Long.MAX_VALUE : had + more);
            } else {
                refused = new IllegalArgumentException(
                        "a subscriber asked for " + count + " tokens: ask for one or more (rule 3.9 of reactive streams)");
            }
            wake();
        }

        @Override
        public void cancel() {
            if (!cancelled) {
                cancelled = true;
                if (!taken) {
                    generating.stop();
                }
                wake();
            }
        }

        /** There may be something to do: a token, the end, a demand or a cancel. */
        void wake() {
            if (wakes.getAndIncrement() == 0) {
                Pending.execute(this);
            }
        }

        @Override
        public void run() {
            int seen = wakes.get();
            do {
                try {
                    signal();
                } catch (Throwable failure) {
                    // A subscriber must not throw. One that does so is as one that has cancelled.
                    cancel();
                    Thread thread = Thread.currentThread();
                    thread.getUncaughtExceptionHandler().uncaughtException(thread, failure);
                }
                if (cancelled) {
                    end();
                }
                seen = wakes.addAndGet(-seen);
            } while (seen != 0);
        }

        private void signal() {
            while (!cancelled && subscriber != null) {
                if (taken) {
                    end().onError(new IllegalStateException(
                            "another subscriber has the tokens of this stream: ask the generator for a stream for each"));
                } else if (refused != null) {
                    generating.stop();
                    end().onError(refused);
                } else {
                    // Before the tokens are looked for: those of a request that is over are all there.
                    boolean over = generating.isDone();
                    Token token = demand.get() > 0 ? generating.poll() : null;
                    if (token != null) {
                        // As many as a subscriber can count are as good as no limit.
                        demand.updateAndGet(had -> had == Long.MAX_VALUE ? had : had - 1);
                        subscriber.onNext(token);
                    } else if (over && generating.isEmpty()) {
                        Throwable failure = generating.failure();
                        Flow.Subscriber<? super Token> last = end();
                        if (failure == null) {
                            last.onComplete();
                        } else {
                            last.onError(failure);
                        }
                    } else {
                        return;
                    }
                }
            }
        }

        /** No signal follows but what is sent to the result, and nothing here keeps the subscriber. */
        private Flow.Subscriber<? super Token> end() {
            Flow.Subscriber<? super Token> last = subscriber;
            subscriber = null;
            if (!taken) {
                generating.listenNoMore();
            }
            return last;
        }
    }
}
