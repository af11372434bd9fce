"""Private training in a loop of your own: model, optimizer and loader made private."""
