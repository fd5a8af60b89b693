//! Messages to a thread that may end at any time. No message stays in the queue of a thread that
//! has ended, so that a caller that waits for an answer sees the end of the thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

/// A message that was not delivered.
#[derive(Debug)]
pub enum Undelivered<T> {
    /// There is no room now.
    Full(T),
    /// The thread has ended. The message has been dropped.
    Gone,
}

/// Where messages are sent to. Clones send to the same thread.
#[derive(Debug)]
pub struct Mailbox<T> {
    send: Sender<T>,
    /// A message that arrives after the thread's last look is removed by its sender: a channel
    /// keeps messages for as long as it has a sender.
    rest: Receiver<T>,
    ended: Arc<AtomicBool>,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        let ended = Arc::clone(&self.ended);
        Self { send: self.send.clone(), rest: self.rest.clone(), ended }
    }
}

impl<T> Mailbox<T> {
    /// Leaves a message. The thread has to be woken to look at it.
    pub fn send(&self, message: T) -> Result<(), Undelivered<T>> {
        match self.send.try_send(message) {
            Ok(()) => {}
            Err(TrySendError::Full(message)) => return Err(Undelivered::Full(message)),
            Err(TrySendError::Disconnected(_)) => return Err(Undelivered::Gone),
        }
        // Pairs with the fence in the inbox's drop: either that finds the message, or this sees
        // that it has looked.
        fence(Ordering::SeqCst);
        if self.ended.load(Ordering::Relaxed) {
            while self.rest.try_recv().is_ok() {}
            return Err(Undelivered::Gone);
        }
        Ok(())
    }
}

/// Where the thread finds its messages.
#[derive(Debug)]
pub struct Inbox<T> {
    receive: Receiver<T>,
    ended: Arc<AtomicBool>,
}

impl<T> Inbox<T> {
    /// The next message, if there is one.
    #[must_use]
    pub fn take(&self) -> Option<T> {
        self.receive.try_recv().ok()
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        while self.receive.try_recv().is_ok() {}
    }
}

/// A mailbox with room for this many messages, and its inbox.
#[must_use]
pub fn mailbox<T>(room: usize) -> (Mailbox<T>, Inbox<T>) {
    let (send, receive) = bounded(room);
    let ended = Arc::new(AtomicBool::new(false));
    let rest = receive.clone();
    (Mailbox { send, rest, ended: Arc::clone(&ended) }, Inbox { receive, ended })
}

#[cfg(test)]
mod tests {
    use futures_channel::oneshot;

    use super::*;

    #[test]
    fn messages_are_taken_in_order_and_room_is_limited() {
        let (mail, inbox) = mailbox(2);
        mail.send(1).unwrap();
        mail.clone().send(2).unwrap();
        assert!(matches!(mail.send(3), Err(Undelivered::Full(3))));
        assert_eq!((inbox.take(), inbox.take(), inbox.take()), (Some(1), Some(2), None));
    }

    #[test]
    fn a_waiter_sees_the_end_whenever_it_comes() {
        for round in 0..20_000 {
            let (mail, inbox) = mailbox(4);
            let thread = std::thread::spawn(move || {
                for _ in 0..round % 64 {
                    std::hint::spin_loop();
                }
                drop(inbox);
            });
            let (answer, receive) = oneshot::channel::<()>();
            let sent = mail.send(answer);
            assert!(!matches!(sent, Err(Undelivered::Full(_))));
            thread.join().unwrap();
            // The mailbox lives on: it must not keep the message alive.
            let mut receive = receive;
            assert_eq!(receive.try_recv(), Err(oneshot::Canceled));
        }
    }
}
