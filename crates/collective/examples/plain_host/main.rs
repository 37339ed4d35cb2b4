//! A rank of an AllReduce that sends no descriptors, and checks every element of its sums.
//!
//! `plain_host CONTROLLER GROUP WORLD RANK DEVICE BYTES[,BYTES...]`, with a device as `soft-192.0.2.1` or `rxe0`.

mod host;

use std::process::ExitCode;

use host::PlainHost;
use millstream_verbs::Device;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(calls) => {
            println!("{calls} sums are right");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("plain_host: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<usize, String> {
    let [controller, group, world, rank, device, sizes] = arguments else {
        return Err("CONTROLLER GROUP WORLD RANK DEVICE BYTES[,BYTES...]".to_owned());
    };
    let number = |text: &str| text.parse::<u32>().map_err(|error| format!("{text}: {error}"));
    let (world, rank) = (number(world)?, number(rank)?);
    let sizes: Vec<u32> = sizes.split(',').map(number).collect::<Result<_, _>>()?;
    let device = Device::open(device).map_err(|error| error.to_string())?;
    let mut host = PlainHost::join(controller, group, world, rank, &device)?;
    for &bytes in &sizes {
        let elements = bytes / size_of::<i32>() as u32;
        let mut vector: Vec<i32> = (0..elements).map(|index| element(rank, index)).collect();
        host.all_reduce(&mut vector)?;
        let wanted =
            |index| (0..world).fold(0, |sum: i32, rank| sum.wrapping_add(element(rank, index)));
        if let Some(index) = (0..elements).find(|&index| vector[index as usize] != wanted(index)) {
            let found = vector[index as usize];
            return Err(format!("{bytes} B: element {index} is {found}, not {}", wanted(index)));
        }
    }
    host.leave()?;
    Ok(sizes.len())
}

/// Sums of these exceed 32 bits.
fn element(rank: u32, index: u32) -> i32 {
    (index.wrapping_mul(0x9e37_79b1) ^ rank.wrapping_mul(0x85eb_ca6b)).cast_signed()
}
