//! What is left of a job once the kernel has moved some of its bytes.

use std::io;

use super::{FileOperation, Job};

/// What is around the page cache begins and ends at a multiple of a block, of which this is the smallest.
const BLOCK: usize = 512;

/// Takes what the kernel said to the rest of a job, behind `done` bytes: how the job ends, if it does.
///
/// Less than was asked for says not why. The rest, asked for once more, does. Around the page cache that
/// must begin with a block; a kernel that finds it does not says EINVAL, which is no answer to what was asked.
pub(super) fn advance<T>(
    job: &Job<T>,
    done: &mut usize,
    result: io::Result<usize>,
) -> Option<io::Result<()>> {
    let short = || {
        Some(Err(match job.operation {
            FileOperation::Read => io::ErrorKind::UnexpectedEof.into(),
            FileOperation::Write | FileOperation::Sync => io::ErrorKind::WriteZero.into(),
        }))
    };
    let count = match result {
        Ok(count) => count,
        Err(error) => {
            return match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => None,
                // Its blocks are larger.
                Some(libc::EINVAL) if job.direct && *done > 0 => short(),
                _ => Some(Err(error)),
            };
        }
    };
    if job.operation == FileOperation::Sync || *done + count >= job.range.len() {
        return Some(Ok(()));
    }
    let before = *done;
    *done += count;
    if job.direct {
        *done -= *done % BLOCK;
    }
    if *done == before { short() } else { None }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Arc;

    use super::super::AlignedBuffer;
    use super::*;

    /// What a job of 8192 bytes comes to, by what the kernel says one time after the other, and how many
    /// bytes are done then.
    fn outcome(
        operation: FileOperation,
        direct: bool,
        said: &[Result<usize, i32>],
    ) -> (Option<Result<(), io::Error>>, usize) {
        let file = Arc::new(File::open("/dev/null").unwrap());
        let (buffer, range) = (AlignedBuffer::default(), 0..8192);
        let job = Job { file, direct, operation, offset: 0, buffer, range, payload: () };
        let mut done = 0;
        for (index, result) in said.iter().enumerate() {
            let result = result.map_err(io::Error::from_raw_os_error);
            let ended = advance(&job, &mut done, result);
            if ended.is_some() || index + 1 == said.len() {
                return (ended, done);
            }
        }
        (None, done)
    }

    #[test]
    fn the_rest_begins_with_a_block_around_the_page_cache_and_anywhere_through_it() {
        use FileOperation::{Read, Write};
        for operation in [Read, Write] {
            assert_eq!(outcome(operation, true, &[Ok(4096 + 700)]).1, 4096 + 512);
            assert_eq!(outcome(operation, false, &[Ok(4096 + 700)]).1, 4096 + 700);
            assert_eq!(outcome(operation, true, &[Err(libc::EINTR), Ok(600)]).1, 512);
            let all = outcome(operation, true, &[Ok(600), Ok(8192 - 512)]).0;
            assert!(matches!(all, Some(Ok(()))));
        }
        assert!(matches!(outcome(FileOperation::Sync, true, &[Ok(0)]).0, Some(Ok(()))));
    }

    #[test]
    fn what_makes_no_progress_has_come_to_the_end() {
        let kind = |operation, direct, said: &[Result<usize, i32>]| {
            outcome(operation, direct, said).0.unwrap().unwrap_err().kind()
        };
        for direct in [true, false] {
            let end = |said: &[_]| kind(FileOperation::Read, direct, said);
            assert_eq!(end(&[Ok(0)]), io::ErrorKind::UnexpectedEof);
            assert_eq!(end(&[Ok(4096), Ok(0)]), io::ErrorKind::UnexpectedEof);
            assert_eq!(kind(FileOperation::Write, direct, &[Ok(0)]), io::ErrorKind::WriteZero);
        }
        assert_eq!(kind(FileOperation::Read, true, &[Ok(100)]), io::ErrorKind::UnexpectedEof);
        // Within a block of a device whose blocks are of 4096 bytes.
        let within = [Ok(4096 + 512), Err(libc::EINVAL)];
        assert_eq!(kind(FileOperation::Read, true, &within), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(FileOperation::Write, true, &within), io::ErrorKind::WriteZero);
    }

    #[test]
    fn what_the_system_says_of_the_rest_is_told() {
        let errno = |direct, said: &[Result<usize, i32>]| {
            outcome(FileOperation::Write, direct, said).0.unwrap().unwrap_err().raw_os_error()
        };
        assert_eq!(errno(true, &[Ok(4096 + 700), Err(libc::ENOSPC)]), Some(libc::ENOSPC));
        assert_eq!(errno(true, &[Err(libc::EINVAL)]), Some(libc::EINVAL));
        assert_eq!(errno(false, &[Ok(700), Err(libc::EINVAL)]), Some(libc::EINVAL));
    }
}
