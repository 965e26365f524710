"""AdaSum in other people's training loops; each module needs the library of its name."""
