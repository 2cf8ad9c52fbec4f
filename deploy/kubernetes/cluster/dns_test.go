package cluster

import (
	"net"
	"net/netip"

	"golang.org/x/net/dns/dnsmessage"
)

// serveDNS answers the pods' questions for the API server's name, and that no other exists. It ends with
// the process.
func serveDNS() error {
	conn, err := net.ListenPacket("udp", nodeIP+":53")
	if err != nil {
		return err
	}
	go func() {
		packet := make([]byte, 1500)
		for {
			size, from, err := conn.ReadFrom(packet)
			if err != nil {
				return
			}
			if answer, err := answerDNS(packet[:size]); err == nil {
				_, _ = conn.WriteTo(answer, from) // the client asks again
			}
		}
	}()
	return nil
}

func answerDNS(packet []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(packet); err != nil || len(m.Questions) != 1 {
		return nil, err
	}
	q := m.Questions[0]
	m.Header = dnsmessage.Header{ID: m.ID, Response: true, Authoritative: true, RCode: dnsmessage.RCodeNameError}
	m.Additionals = nil
	if q.Name.String() == "kubernetes.default.svc.cluster.local." {
		m.RCode = dnsmessage.RCodeSuccess
		if q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(serviceIP).As4()},
			}}
		}
	}
	return m.Pack()
}
