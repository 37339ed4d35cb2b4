//! Sockets and threads: UDP with segmentation offload, epoll, progress threads
