package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;

/** What a subscriber sees of the tokens of a request. The rules of reactive streams have PublisherRulesTest. */
class PublisherTest extends Support {
    /** Asks for some tokens at first, and for some after each. */
    static class Reader implements Flow.Subscriber<Token> {
        private final long first;
        private final long then;
        final List<Token> tokens = new ArrayList<>();
        final CompletableFuture<List<Token>> ended = new CompletableFuture<>();
        volatile Flow.Subscription subscription;

        Reader(long first, long then) {
            this.first = first;
            this.then = then;
        }

        @Override
        public void onSubscribe(Flow.Subscription given) {
            assertNull(subscription);
            subscription = given;
            ask(first);
        }

        @Override
        public void onNext(Token token) {
            assertFalse(ended.isDone());
            synchronized (this) {
                tokens.add(token);
            }
            ask(then);
        }

        private void ask(long count) {
            if (count > 0) {
                subscription.request(count);
            }
        }

        @Override
        public void onError(Throwable failure) {
            assertTrue(ended.completeExceptionally(failure));
        }

        @Override
        public void onComplete() {
            assertTrue(ended.complete(tokens));
        }

        /** How many tokens it has got. */
        synchronized int read() {
            return tokens.size();
        }

        int[] ids() throws Exception {
            return ended.get(20, TimeUnit.SECONDS).stream().mapToInt(Token::id).toArray();
        }

        Throwable failure() throws Exception {
            return ended.handle((tokens, failure) -> failure).get(20, TimeUnit.SECONDS);
        }
    }

    private static void cancelled(TokenStream stream) throws Exception {
        GenerateResponse response = stream.response().get(20, TimeUnit.SECONDS);
        assertEquals(FinishReason.CANCELLED, response.choices().get(0).finishReason());
    }

    @Test
    void aSubscriberGetsTheTokensThatAReaderGets() throws Exception {
        try (Generator generator = GeneratorTest.open()) {
            List<Token> expected = generator.stream(GeneratorTest.likely(60).logprobs(2)).tokens().toList();
            for (long[] asked : new long[][] {{1, 1}, {7, 1}, {1, 3}, {Long.MAX_VALUE, 0}, {Long.MAX_VALUE, Long.MAX_VALUE}}) {
                Reader reader = new Reader(asked[0], asked[1]);
                TokenStream stream = generator.stream(GeneratorTest.likely(60).logprobs(2));
                stream.publisher().subscribe(reader);
                assertEquals(expected, reader.ended.get(20, TimeUnit.SECONDS));
                assertEquals(60, stream.response().join().choices().get(0).tokens().length);
                // After the end nothing follows, whatever is asked.
                reader.subscription.request(1);
                reader.subscription.request(-1);
                reader.subscription.cancel();
                assertEquals(FinishReason.LENGTH, expected.get(59).finishReason());
            }
            // All answers of a request, each in its order.
            Reader many = new Reader(Long.MAX_VALUE, 0);
            generator.stream(GeneratorTest.likely(20).n(4)).publisher().subscribe(many);
            assertEquals(80, many.ids().length);
        }
    }

    @Test
    void tokensWaitForDemandAndTheRequestDoesNot() throws Exception {
        try (Generator generator = GeneratorTest.open()) {
            int[] expected = generator.generate(GeneratorTest.likely(12)).choices().get(0).tokens();
            Reader reader = new Reader(0, 0);
            TokenStream stream = generator.stream(GeneratorTest.likely(12));
            stream.publisher().subscribe(reader);
            // The request ends although nothing was asked for.
            assertArrayEquals(expected, stream.response().get(20, TimeUnit.SECONDS).choices().get(0).tokens());
            assertEquals(0, reader.read());
            for (int count = 1; count <= 3; count++) {
                int read = reader.read();
                int asked = count;
                reader.subscription.request(count);
                eventually(() -> reader.read() == read + asked, () -> reader.read() + " tokens");
                Thread.sleep(20);
                assertEquals(read + asked, reader.read());
                assertFalse(reader.ended.isDone());
            }
            // The end needs no demand, but comes after the last token.
            reader.subscription.request(6);
            assertArrayEquals(expected, reader.ids());
        }
    }

    @Test
    void toCancelASubscriptionEndsTheRequest() throws Exception {
        try (Generator generator = GeneratorTest.open()) {
            Reader reader = new Reader(3, 0);
            TokenStream stream = generator.stream(GeneratorTest.likely(500));
            stream.publisher().subscribe(reader);
            eventually(() -> reader.read() == 3, () -> reader.read() + " tokens");
            reader.subscription.cancel();
            reader.subscription.cancel();
            reader.subscription.request(100);
            cancelled(stream);
            Thread.sleep(20);
            assertEquals(3, reader.read());
            assertFalse(reader.ended.isDone());
            // At once, before the first token.
            TokenStream never = generator.stream(GeneratorTest.likely(500));
            Reader leaves = new Reader(0, 0) {
                @Override
                public void onSubscribe(Flow.Subscription given) {
                    given.request(5);
                    given.cancel();
                }
            };
            never.publisher().subscribe(leaves);
            cancelled(never);
            assertEquals(0, leaves.read());
        }
    }

    @Test
    void whatEndsARequestIsTold() throws Exception {
        try (Generator generator = GeneratorTest.open(); Generator stepped = GeneratorTest.stepped()) {
            // A stream that was closed ends as others do, with the tokens that it has.
            TokenStream closed = stepped.stream(GeneratorTest.likely(12));
            Reader reader = new Reader(Long.MAX_VALUE, 0);
            closed.publisher().subscribe(reader);
            stepped.step();
            stepped.step();
            closed.close();
            while (stepped.step()) {
                assertFalse(reader.ended.isCompletedExceptionally());
            }
            assertEquals(2, reader.ids().length);
            cancelled(closed);
            TokenStream gone = stepped.stream(GeneratorTest.likely(12));
            Reader told = new Reader(1, 0);
            gone.publisher().subscribe(told);
            gone.response().cancel(true);
            assertInstanceOf(CancellationException.class, told.failure());
            // An error of the caller ends the request, too.
            TokenStream refused = generator.stream(GeneratorTest.likely(500));
            Reader wrong = new Reader(2, 0);
            refused.publisher().subscribe(wrong);
            wrong.subscription.request(0);
            assertEquals("a subscriber asked for 0 tokens: ask for one or more (rule 3.9 of reactive streams)",
                    assertInstanceOf(IllegalArgumentException.class, wrong.failure()).getMessage());
            cancelled(refused);
        }
    }

    @Test
    void oneSubscriberHasTheTokens() throws Exception {
        try (Generator generator = GeneratorTest.open()) {
            TokenStream stream = generator.stream(GeneratorTest.likely(40));
            Reader first = new Reader(1, 1);
            Reader second = new Reader(1, 1);
            stream.publisher().subscribe(first);
            stream.publisher().subscribe(second);
            assertInstanceOf(IllegalStateException.class, second.failure());
            second.subscription.cancel();
            assertEquals(40, first.ids().length);
            Reader third = new Reader(1, 1);
            stream.publisher().subscribe(third);
            assertInstanceOf(IllegalStateException.class, third.failure());
            assertThrows(NullPointerException.class, () -> stream.publisher().subscribe(null));
        }
    }

    /** A subscriber that throws is as one that has cancelled, and what it threw is not lost. */
    @Test
    void subscribersThatThrow() throws Exception {
        AtomicReference<Throwable> heard = new AtomicReference<>();
        Thread.UncaughtExceptionHandler before = Thread.getDefaultUncaughtExceptionHandler();
        Thread.setDefaultUncaughtExceptionHandler((thread, failure) -> heard.set(failure));
        try (Generator generator = GeneratorTest.open()) {
            IllegalStateException thrown = new IllegalStateException("as a test does");
            Reader throwing = new Reader(9, 0) {
                @Override
                public void onNext(Token token) {
                    super.onNext(token);
                    throw thrown;
                }
            };
            TokenStream stream = generator.stream(GeneratorTest.likely(500));
            stream.publisher().subscribe(throwing);
            cancelled(stream);
            eventually(() -> heard.get() == thrown, () -> "heard " + heard.get());
            assertEquals(1, throwing.read());
            assertFalse(throwing.ended.isDone());
            TokenStream other = generator.stream(GeneratorTest.likely(500));
            assertSame(thrown, assertThrows(IllegalStateException.class, () -> other.publisher().subscribe(
                    new Reader(1, 1) {
                        @Override
                        public void onSubscribe(Flow.Subscription given) {
                            throw thrown;
                        }
                    })));
            cancelled(other);
        } finally {
            Thread.setDefaultUncaughtExceptionHandler(before);
        }
    }

    /** A subscriber that waits for ever keeps neither other subscribers nor the generator. */
    @Test
    void aSubscriberMayBlock() throws Exception {
        CompletableFuture<Void> leave = new CompletableFuture<>();
        try (Generator generator = GeneratorTest.open()) {
            Reader waits = new Reader(1, 1) {
                @Override
                public void onNext(Token token) {
                    leave.join();
                    super.onNext(token);
                }
            };
            generator.stream(GeneratorTest.likely(12)).publisher().subscribe(waits);
            Reader goes = new Reader(1, 1);
            generator.stream(GeneratorTest.likely(12)).publisher().subscribe(goes);
            assertEquals(12, goes.ids().length);
            assertEquals(0, waits.read());
            leave.complete(null);
            assertEquals(12, waits.ids().length);
        } finally {
            leave.complete(null);
        }
    }
}
