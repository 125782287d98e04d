package pagoda

import (
	"math"
	"testing"
	"time"
)

func TestLimitsAreRoundedUp(t *testing.T) {
	for value, want := range map[time.Duration]uint64{
		0: 0, 1: 1, 999: 1, time.Microsecond: 1, time.Microsecond + 1: 2, math.MaxInt64: math.MaxInt64/1000 + 1,
	} {
		if got, err := microseconds(value, "limit"); err != nil || uint64(got) != want {
			t.Errorf("%d ns are %d µs (%v), where %d are due", value, got, err, want)
		}
	}
}
