//! What the kernel tells about a port in files: kinds of GIDs, counters.

use std::fs;
use std::path::{Path, PathBuf};

use millstream_roce::Counters;

/// The folder of a port.
pub(super) struct Port(PathBuf);

impl Port {
    pub(super) fn new(device: &str, port: u8) -> Self {
        Self::under(Path::new("/sys/class/infiniband"), device, port)
    }

    fn under(root: &Path, device: &str, port: u8) -> Self {
        Self(root.join(device).join("ports").join(port.to_string()))
    }

    /// Whether this entry of the GID table is of RoCEv2; `None` when it is empty.
    pub(super) fn gid_is_version_2(&self, index: u8) -> Option<bool> {
        // An empty entry's file exists, and cannot be read.
        let path = self.0.join("gid_attrs/types").join(index.to_string());
        let text = fs::read_to_string(path).ok()?;
        Some(text.trim() == "RoCE v2")
    }

    /// Counters, by the names that drivers give to them: rxe's first, then mlx5's.
    pub(super) fn counters(&self) -> Counters {
        let read = |names: &[&str]| {
            let one = |name: &&str| {
                let text = fs::read_to_string(self.0.join("hw_counters").join(name)).ok()?;
                text.trim().parse::<u64>().ok()
            };
            names.iter().find_map(one).unwrap_or(0)
        };
        Counters {
            packets_sent: read(&["sent_pkts"]),
            packets_received: read(&["rcvd_pkts"]),
            duplicates: read(&["duplicate_request"]),
            out_of_sequence: read(&["out_of_seq_request", "out_of_sequence"]),
            rnr_naks_sent: read(&["send_rnr_err"]),
            naks_received: read(&["rcvd_seq_err", "packet_seq_err"]),
            rnr_naks_received: read(&["rcvd_rnr_err", "rnr_nak_retry_err"]),
            timeouts: read(&["local_ack_timeout_err"]),
            congestion_notifications: read(&["rp_cnp_handled"]),
            ..Counters::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_of_files_is_read() {
        let root = std::env::temp_dir().join(format!("millstream-sysfs-{}", std::process::id()));
        let port = root.join("rxe0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
        fs::create_dir_all(port.join("hw_counters")).unwrap();
        for (file, text) in [
            ("gid_attrs/types/0", "IB/RoCE v1\n"),
            ("gid_attrs/types/1", "RoCE v2\n"),
            ("hw_counters/sent_pkts", "17\n"),
            ("hw_counters/out_of_sequence", "3\n"),
            ("hw_counters/duplicate_request", "many\n"),
        ] {
            fs::write(port.join(file), text).unwrap();
        }
        let port = Port::under(&root, "rxe0", 1);
        assert_eq!([0, 1, 2].map(|i| port.gid_is_version_2(i)), [Some(false), Some(true), None]);
        let expected = Counters { packets_sent: 17, out_of_sequence: 3, ..Counters::default() };
        assert_eq!(port.counters(), expected);
        fs::remove_dir_all(root).unwrap();
    }
}
