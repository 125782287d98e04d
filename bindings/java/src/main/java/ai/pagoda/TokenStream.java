package ai.pagoda;

import java.util.ArrayDeque;
import java.util.Iterator;
import java.util.NoSuchElementException;
import java.util.Spliterator;
import java.util.Spliterators;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.Flow;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.Condition;
import java.util.concurrent.locks.ReentrantLock;
import java.util.stream.Stream;
import java.util.stream.StreamSupport;

/**
 * The answers to a request as they are generated: tokens, to be read once, and the response. Tokens that are not read yet
 * wait here: a slow reader stops neither the request nor others. To close it ends the request, unless the request has a
 * cancel of its own, which then does so alone.
 *
 * <pre>{@code
 * try (TokenStream stream = generator.stream(request)) {
 *     for (Token token : stream) {
 *         System.out.print(token.text());
 *     }
 *     GenerateResponse response = stream.response().join();
 * }
 * }</pre>
 */
public final class TokenStream implements Iterable<Token>, AutoCloseable {
    private final Generating generating;

    TokenStream(Generating generating) {
        this.generating = generating;
    }

    /**
     * The tokens of all answers that were not read yet, in the order in which they are generated. To go on waits for the next
     * token, and throws what ended the request, if that is not its end.
     *
     * @return an iterator
     */
    @Override
    public Iterator<Token> iterator() {
        return new Iterator<>() {
            private Token next;

            @Override
            public boolean hasNext() {
                if (next == null) {
                    next = generating.next();
                }
                return next != null;
            }

            @Override
            public Token next() {
                if (!hasNext()) {
                    throw new NoSuchElementException("the answers have ended");
                }
                Token token = next;
                next = null;
                return token;
            }
        };
    }

    /**
     * The same tokens as a sequential stream. To close that closes this one.
     *
     * @return the stream
     */
    public Stream<Token> tokens() {
        int traits = Spliterator.ORDERED | Spliterator.NONNULL;
        return StreamSupport.stream(Spliterators.spliteratorUnknownSize(iterator(), traits), false).onClose(this::close);
    }

    /**
     * The same tokens for one subscriber, which is called on threads of the binding's own, and may block there. It gets as
     * many tokens as it asks for. The others wait here, as they do for all readers: at most as many as the request can have,
     * which is its {@code n} times its {@code maxNewTokens}. After the last token comes the end, or what ended the request. To
     * cancel the subscription ends the request, as {@link #close} does.
     *
     * <p>A second subscriber of the same stream gets an {@link IllegalStateException}, and changes nothing for the first.
     *
     * @return the publisher
     */
    public Flow.Publisher<Token> publisher() {
        return new TokenPublisher(generating);
    }

    /**
     * The whole response, when the request has ended. The tokens need not be read for that.
     *
     * @return the response, or what ended the request; to cancel it ends the request, as {@link #close} does
     */
    public CompletableFuture<GenerateResponse> response() {
        return generating;
    }

    /**
     * Ends the request if it runs, and does not wait for that. The response has what was generated until then, and tokens
     * that were generated before still follow. Doing so again does nothing.
     */
    @Override
    public void close() {
        generating.stop();
    }

    /** A request under way. */
    static final class Generating extends Pending<GenerateResponse> {
        // Not a queue of the library: to say that it is over must not take memory.
        private final ReentrantLock lock = new ReentrantLock();
        private final Condition more = lock.newCondition();
        private final ArrayDeque<Token> tokens = new ArrayDeque<>();
        /** What a subscriber has run when there is a token or the end; null if there never was one. */
        private final AtomicReference<Runnable> listener = new AtomicReference<>();

        Generating(Cancel cancel) {
            super(cancel);
            whenComplete((response, error) -> {
                lock.lock();
                more.signalAll();
                lock.unlock();
                tellListener();
            });
        }

        private void tellListener() {
            Runnable told = listener.get();
            if (told != null) {
                told.run();
            }
        }

        /** Runs this after each token from now on, and at the end, and returns true; false if there was one before. */
        boolean listen(Runnable told) {
            return listener.compareAndSet(null, told);
        }

        void listenNoMore() {
            listener.set(() -> {});
        }

        /** Called by the native part, on a thread of Pagoda's. */
        void token(int choice, int id, int finishReason, byte[] text, float logprob, int rank, int[] topTokens,
                float[] topLogprobs) {
            Token token = new Token(choice, id, Native.string(text), FinishReason.of(finishReason),
                    topTokens == null ? null : TokenLogprobs.of(logprob, rank, topTokens, topLogprobs));
            lock.lock();
            try {
                tokens.add(token);
                more.signal();
            } finally {
                lock.unlock();
            }
            tellListener();
        }

        /** Called by the native part, on a thread of Pagoda's, after the last token. It frees the response after that. */
        void done(Throwable error, long response) {
            try {
                ended(error, error == null ? Generator.read(response) : null, unwanted -> {});
            } catch (Throwable failure) {
                failed(failure);
            }
        }

        /** Waits for the next token; null at the end. */
        Token next() {
            try {
                lock.lockInterruptibly();
                try {
                    while (tokens.isEmpty() && !isDone()) {
                        more.await();
                    }
                    if (!tokens.isEmpty()) {
                        return tokens.remove();
                    }
                } finally {
                    lock.unlock();
                }
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
                throw new CancellationException("interrupted while waiting for a token");
            }
            Throwable failure = failure();
            if (failure instanceof PagodaException || failure instanceof CancellationException) {
                throw (RuntimeException) failure;
            }
            if (failure != null) {
                throw new CompletionException(failure);
            }
            return null;
        }

        /** The next token if there is one already; otherwise null. */
        Token poll() {
            lock.lock();
            try {
                return tokens.poll();
            } finally {
                lock.unlock();
            }
        }

        boolean isEmpty() {
            lock.lock();
            try {
                return tokens.isEmpty();
            } finally {
                lock.unlock();
            }
        }

        /** What ended the request; null if that is its end. It has ended. */
        Throwable failure() {
            try {
                join();
                return null;
            } catch (CompletionException error) {
                return error.getCause();
            } catch (CancellationException error) {
                return error;
            }
        }
    }
}
