//! Prints what this machine can do without us: `udp_stream [SECONDS] [SEGMENT]`.

use std::time::Duration;

use millstream_net::baseline::{StreamReport, memory_copy, udp_streams};

/// Far more than caches hold.
const WORKING_SET: usize = 256 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: f64 = arguments.next().map_or(Ok(2.0), |argument| argument.parse())?;
    let segment: usize = arguments.next().map_or(Ok(4096), |argument| argument.parse())?;
    let duration = Duration::try_from_secs_f64(seconds)?;
    let report = udp_streams(1, duration, segment, WORKING_SET)?;
    let StreamReport { bytes, lost, segmentation_offload, .. } = report;
    println!(
        "udp stream, segment {segment}, offload {segmentation_offload}: {:.3} GB/s ({bytes} bytes, \
         {lost} lost)",
        report.gb_per_s()
    );
    println!("memory copy: {:.3} GB/s", memory_copy(duration, WORKING_SET).gb_per_s());
    Ok(())
}
