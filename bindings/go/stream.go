package pagoda

// #include "bridge.h"
import "C"

import (
	"context"
	"iter"
	"sync"
)

// Token is a token of an answer, as it is generated.
type Token struct {
	// Choice is which answer it belongs to.
	Choice int
	// ID is the token.
	ID uint32
	// Text is the text that is new. It is empty if the token ends inside a character, or if the text may begin a stop text.
	Text string
	// FinishReason is why the answer ends with this token; [FinishReasonNone] if it does not.
	FinishReason FinishReason
	// Logprobs is the log probabilities; nil if they were not asked for.
	Logprobs *TokenLogprobs
}

// TokenStream is the answers to a request as they are generated. Tokens that are not read yet wait in it: a slow reader stops
// neither the request nor others.
type TokenStream struct {
	cancel context.CancelFunc
	done   chan struct{} // closed at the end, when response and err are set

	response *GenerateResponse
	err      error

	mu    sync.Mutex
	more  sync.Cond // with mu: there are tokens, or the end
	queue []Token   // tokens that were not read yet
	ended bool
}

// Stream starts to answer a request on a thread of Pagoda, and returns at once. An error in the request itself is returned
// at once. When this returns, the arguments may be reused.
//
//	stream, err := generator.Stream(ctx, request)
//	...
//	for token, err := range stream.Tokens() {
//		if err != nil {
//			return err
//		}
//		fmt.Print(token.Text)
//	}
//	response, err := stream.Response()
//
// The stream need not be read, nor closed: the request runs to its end, or until ctx is done.
func (g *Generator) Stream(ctx context.Context, request *GenerateRequest) (*TokenStream, error) {
	if err := done(ctx); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	s := &TokenStream{cancel: cancel, done: make(chan struct{})}
	s.more.L = &s.mu
	if err := g.start(ctx, request, &asyncGenerate{token: s.add, end: s.finish}); err != nil {
		cancel()
		return nil, err
	}
	return s, nil
}

// Tokens is the tokens of all answers, in the order in which they are generated. If the request failed or ctx is done, the
// last element is an error. Leaving the loop early cancels the request. Each token is read once: a second loop goes on where
// the first one ended.
func (s *TokenStream) Tokens() iter.Seq2[Token, error] {
	return func(yield func(Token, error) bool) {
		var batch []Token
		for ended := false; !ended; {
			batch, ended = s.take(batch)
			for i, token := range batch {
				if !yield(token, nil) {
					s.putBack(batch[i+1:])
					s.Cancel()
					return
				}
			}
		}
		if s.err != nil {
			yield(Token{}, s.err)
		}
	}
}

// Response waits for the end of the request, and is the whole of it: Response does not need Tokens to be read. After a Cancel,
// or if ctx is done, it has what was generated until then, and the error is [ErrCancelled].
func (s *TokenStream) Response() (*GenerateResponse, error) {
	<-s.done
	return s.response, s.err
}

// Done is closed when the request has ended: [TokenStream.Response] does not wait any more.
func (s *TokenStream) Done() <-chan struct{} { return s.done }

// Cancel ends the request, and does not wait for that. Tokens that were generated before it still follow.
func (s *TokenStream) Cancel() { s.cancel() }

// take waits for tokens or the end. It returns the tokens, and leaves the memory of the last batch for the next ones.
func (s *TokenStream) take(last []Token) (batch []Token, ended bool) {
	clear(last)
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.queue) == 0 && !s.ended {
		s.more.Wait()
	}
	batch, s.queue = s.queue, last[:0]
	return batch, s.ended
}

// putBack has tokens read again that were taken and not read.
func (s *TokenStream) putBack(tokens []Token) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queue = append(tokens[:len(tokens):len(tokens)], s.queue...)
}

// add is called for each token, on a thread of Pagoda.
func (s *TokenStream) add(token Token) {
	s.mu.Lock()
	s.queue = append(s.queue, token)
	s.mu.Unlock()
	s.more.Signal()
}

// finish is called once, after the last token, on a thread of Pagoda.
func (s *TokenStream) finish(response *GenerateResponse, err error) {
	s.response, s.err = response, err
	s.mu.Lock()
	s.ended = true
	s.mu.Unlock()
	s.more.Broadcast()
	close(s.done)
	s.cancel()
}
