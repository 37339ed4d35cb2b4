//! Seeded network simulator: virtual time, faulty links, checkers, pcap
