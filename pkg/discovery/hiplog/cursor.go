package hiplog

// cursor parses b from at on. Its methods advance behind what they parse; after a failure
// the position is undefined.
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

func (c *cursor) literal(want string) bool {
	if len(c.b)-c.at >= len(want) && string(c.b[c.at:c.at+len(want)]) == want {
		c.at += len(want)
		return true
	}
	return false
}

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
func (c *cursor) hex(v *uint64) bool {
	if !c.literal("0x") {
		return false
	}
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
	if c.literal("(nil)") {
		*a = 0
		return true
	}
	return c.hex((*uint64)(a))
}
