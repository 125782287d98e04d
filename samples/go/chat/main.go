// Talks with a language model: chat FOLDER [SEED]. Each line of the input is a message; the answer is printed as it is
// generated. The same seed gives the same answers. Ctrl-C ends an answer, and the program.
//
// The generator keeps the keys and values of the session, so a turn costs what is new, however long the talk is.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strconv"

	"pagoda"
)

func main() {
	seed, err := uint64(0), error(nil)
	if len(os.Args) == 3 {
		seed, err = strconv.ParseUint(os.Args[2], 10, 64)
	}
	if len(os.Args) < 2 || len(os.Args) > 3 || err != nil {
		fmt.Fprintf(os.Stderr, "usage: %s FOLDER [SEED]\n", os.Args[0])
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := chat(ctx, os.Args[1], seed); err != nil {
		fmt.Fprintln(os.Stderr, "chat:", err)
		os.Exit(1)
	}
}

func chat(ctx context.Context, folder string, seed uint64) error {
	generator, err := pagoda.OpenGenerator(ctx, folder, nil)
	if err != nil {
		return err
	}
	defer generator.Close()
	var messages []pagoda.Message
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		messages = append(messages, pagoda.Message{Role: "user", Content: lines.Text()})
		stream, err := generator.Stream(ctx, &pagoda.GenerateRequest{
			Messages:          messages,
			MaxNewTokens:      pagoda.Ptr(200),
			Temperature:       pagoda.Ptr(0.2),
			TopP:              pagoda.Ptr(0.9),
			RepetitionPenalty: pagoda.Ptr(1.1),
			Seed:              &seed,
			Session:           "chat",
			ContextEnd:        pagoda.ContextEndStop,
		})
		if err != nil {
			return err
		}
		for token, err := range stream.Tokens() {
			if err != nil {
				return err
			}
			fmt.Print(token.Text)
		}
		response, err := stream.Response()
		if err != nil {
			return err
		}
		answer := response.Choices[0]
		fmt.Printf("\n[%d tokens; %d of the prompt's %d were cached; %s]\n", len(answer.Tokens), response.CachedTokens,
			len(response.PromptTokens), answer.FinishReason)
		messages = append(messages, pagoda.Message{Role: "assistant", Content: answer.Text})
	}
	return nil
}
