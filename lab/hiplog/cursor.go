package hiplog

// cursor parses b from at on. Its methods advance behind what they parse; after a failure at is
// the first byte that is not as expected.
type cursor struct {
	b  []byte
	at int
}

func (c *cursor) byte(want byte) bool {
	if c.at < len(c.b) && c.b[c.at] == want {
		c.at++
		return true
	}
	return false
}

// literal does not move if want is not next.
func (c *cursor) literal(want string) bool {
	if c.peek(want) {
		c.at += len(want)
		return true
	}
	return false
}

// peek reports whether want is next.
func (c *cursor) peek(want string) bool {
	return len(c.b)-c.at >= len(want) && string(c.b[c.at:c.at+len(want)]) == want
}

// must is literal for text that has no alternative: after a failure the position is where the text
// and want begin to differ.
func (c *cursor) must(want string) bool {
	for i := range len(want) {
		if !c.byte(want[i]) {
			return false
		}
	}
	return true
}

// broken reports whether what is next is the end of the text, or is within a word: the rest was cut
// or overwritten. Otherwise it begins at a word: the writer said something else than was expected.
func (c *cursor) broken() bool {
	word := func(i int) bool {
		return i >= 0 && i < len(c.b) && (isDigit(c.b[i]) || c.b[i]|0x20-'a' < 26 || c.b[i] == '_' || c.b[i] >= 0x80)
	}
	return c.atEnd() || word(c.at-1) && word(c.at)
}

func (c *cursor) atEnd() bool { return c.at >= len(c.b) }

func (c *cursor) spaces() {
	for c.at < len(c.b) && c.b[c.at] == ' ' {
		c.at++
	}
}

func isDigit(b byte) bool { return b-'0' < 10 }

// decimal parses a number of at most 19 digits, which fits.
func (c *cursor) decimal(v *uint64) bool {
	var n uint64
	start := c.at
	for c.at < len(c.b) && isDigit(c.b[c.at]) {
		n = n*10 + uint64(c.b[c.at]-'0')
		c.at++
	}
	*v = n
	return c.at > start && c.at-start <= 19
}

// hexValue returns the value of a digit, 16 or more for another byte.
func hexValue(b byte) byte {
	if isDigit(b) {
		return b - '0'
	}
	if b |= 0x20; b-'a' < 6 {
		return b - 'a' + 10
	}
	return 16
}

// hex parses 0x and up to 16 digits.
func (c *cursor) hex(v *uint64) bool { return c.must("0x") && c.digits(v) }

// digits parses up to 16 hexadecimal digits.
func (c *cursor) digits(v *uint64) bool {
	var n uint64
	start := c.at
	for c.at < len(c.b) {
		digit := hexValue(c.b[c.at])
		if digit > 15 {
			break
		}
		n = n<<4 | uint64(digit)
		c.at++
	}
	*v = n
	return c.at > start && c.at-start <= 16
}

// address parses the output of %p and 0x%zx.
func (c *cursor) address(a *Address) bool {
	if c.byte('(') {
		*a = 0
		return c.must("nil)")
	}
	return c.hex((*uint64)(a))
}
